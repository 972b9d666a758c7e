"""What is parked, read from control and pages alone: no worker, no GPU, no model, nothing is changed."""
