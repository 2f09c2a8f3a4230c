"""The explorer: a local page on which people look at the guarantee. Needs ``pip install '.[explore]'``.

subject (a model, its noise, data) -> lineup (methods, calibrated as they are asked for) -> looks, attacks, curves -> page
"""
