"""The errors that say why there is no plan, or that none was found in time.

infeasible.py  which block, constraints or devices exclude every assignment
shortfall.py   by how many bytes the memory limits are too small
nearest.py     the smallest changes with which there is a plan
placing.py     which nodes of a workload do not fit on its accelerators, and what would be enough
"""
