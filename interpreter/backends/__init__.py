"""What runs requests: the local runtime, hosted APIs, and Echo, the scripted fake."""
