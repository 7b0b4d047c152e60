"""Budgets of runs, their costs, and prices of models."""
