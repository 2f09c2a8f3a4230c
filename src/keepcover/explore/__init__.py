"""The explorer: a local page that shows the guarantee. Needs the extra ``explore``.

subject (a model, its noise, data) -> lineup (methods, calibrated as they are asked for) -> looks, attacks, curves -> page
"""
