"""Names of models: where each lies on this machine, and how it comes from the Hugging Face hub."""
