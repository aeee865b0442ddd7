"""State that many processes hold together: how the rows of a batch reach them, and what they say to each other."""
