"""A whole engine in virtual time: real scheduler, pool, evictor, caches and residency; simulated device, disk, clock.

Everything follows from a seed. Pages remember what was written into them and for whom, so that reading a wrong, freed,
foreign or half-written page is seen at once, and is a wrong token besides.
"""
