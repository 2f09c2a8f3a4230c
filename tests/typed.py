"""Run-time types as PEP 484 means them: a whole number is a float."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
