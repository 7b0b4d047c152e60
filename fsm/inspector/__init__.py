"""Implements `umbel fsm`: an automaton printed and drawn, before and after compression."""
