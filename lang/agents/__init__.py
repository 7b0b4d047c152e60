"""The words of agents: functions as tools, and what a program asks of `state.call_tools`."""
