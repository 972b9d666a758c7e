"""Parking and restoring: the only bridge between `gpu` and `snapshot_store`."""
