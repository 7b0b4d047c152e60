"""Compares engines that enforce constraints: compile times, masks, and which texts they take."""
