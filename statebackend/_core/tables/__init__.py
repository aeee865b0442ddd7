"""Copy-on-write maps, and the tables of states made of them."""
