"""The search for the fastest assignment, and for the proof that none is faster.

search.py              the order of the steps, and the share of the time that each may take
search_state.py        the steps themselves, on the incumbent and the bound
search_with_routes.py  a second search, over plans whose stages hand values on
intervals.py           the best way to cut a topological order into stages
by_frontiers.py        a bound, or that nothing fits, from how far stages get within their memory
by_cuts.py             a better plan, or a bound, from the cuts near a target
orders.py              the topological orders that are cut
"""
