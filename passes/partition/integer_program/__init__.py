"""Feasibility at a target as an integer program: is there an assignment with no stage over the target?

assignment.py   the variables, which say the stage of every node, and the order of stages
memory_rows.py  the rows that keep every stage within its device's memory
feasibility.py  the whole program, with the rows for work and transfers
"""
