"""Lower bounds, and refutations of a target without an integer program.

windows.py        the stages that each node can be on within a target
least_load.py     the least load of any stage that holds a given node, as a minimum cut
load_network.py   the network of those cuts
downsets.py       all assignments of a graph with few down-sets, by dynamic programming
relaxation.py     the same with relaxed rules for a tensor's cost and for memory
relaxed_bound.py  bounds for stages that are all alike, over joined nodes and over all
frontiers.py      how far stages get within a target and their memory, by the largest down-sets alone
stage_table.py    all stages that a chain of down-sets can have within a target
chains.py         the fastest chain of down-sets, and the one that leaves most room to hand tensors on
accounts.py       the latter, where the stages of all chains are too many for a table
whole_sends.py    a chain whose stages have the time for every single send
dominance.py      joins nodes that may share a device at no loss, so that fewer down-sets are left
near_cuts.py      the down-sets that an assignment near a bound can be cut at, where all are too many
cut_graph.py      down-sets as closures whose price is the cost of cut tensors
closures.py       all closures that keep to limits, by what they cost beyond the least
side_branches.py  leaves small branches out, for the same reason
"""
