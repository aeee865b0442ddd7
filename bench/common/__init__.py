"""What the comparisons share: rows of figures with their targets, the description of the machine, plots."""
