"""Schedule and device in, configs out: the space of all that tuning may choose, and the few points it times by default.

`space` spans the space and draws from it, `measured` holds what was fastest where it was measured, as data.
"""
