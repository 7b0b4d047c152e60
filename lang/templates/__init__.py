"""The formats that umbel ships, and the killable process that renders all other chat templates."""
