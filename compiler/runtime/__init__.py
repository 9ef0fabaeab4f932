"""Comes in: a function over tensors. Goes out: its result, by a launch plan from the third call of a kind on.

`torch_state` reads what torch is doing, `recording` notes the steps of one run, `plan` turns them into a function that
replays them, `plan_cache` finds the plan of a call and checks that it still holds.
"""
