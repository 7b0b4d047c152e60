"""Chooses the replica that computes a call: the tree of what all replicas have cached, policies, load."""
