"""Goals of fairness and overload, measured on the real engine in virtual time with the costs of a large GPU.

Scheduler, pool, evictor, residency and prefix cache are the real ones. The device costs time by a formula and computes
nothing; whether pages hold what they must is the other simulation's question (`simulation`).
"""
