"""Watch the norms: what the training log of a run says of spikes, broken numbers, drift and restarts.

read -> baseline -> (spikes, broken numbers, drift, restarts, control) -> watch. `training_log` is the contract between
the readers and the rest; everything is judged in the order in which it was written, from earlier rows alone.
"""
