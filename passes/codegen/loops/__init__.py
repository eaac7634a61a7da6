"""Loops of a generated method: what a trace has round by round is written as the author's loop again.

rolled_up.py      all that repeats in a body, as loops of the kinds below
author_loops.py   the loops around a line in its author's source: their counters and lists
tokens.py         statements as tokens, and the value that each name stands for
entries.py        a body as statements and loops, with what every attempt to find rounds needs
members.py        loops over the members of a container: `for block in self.blocks:`
sums.py           additions that are the author's `sum` over members
rolling.py        loops over numbers: `for t in range(3):`
rounds.py         what the rounds of such a loop have in common
counted.py        numbers that change from round to round, as what the loop counts
given.py          values from before, one after another: `for up, skip in zip(self.ups, skips)`
last_round.py     a last round whose lines are incomplete, because nobody reads their results
looped.py         a body with a loop in place of its rounds
comprehensions.py a loop that only fills a list, in one line
over_members.py   a loop that counts the members of a list, as one over the members
together.py       the values of one statement of the author's, in one line
unfold_alike.py   gives the same lines to all rounds, where one has a line too long
"""
