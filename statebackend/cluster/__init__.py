"""State that many processes hold together: how the rows of a batch reach them, and their messages to each other."""
