"""The store: checkpoints, their files and their manifests, committed one after the other."""
