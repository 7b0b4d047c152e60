"""The simulator: how a workload would run on a number of replicas, without computing any model."""
