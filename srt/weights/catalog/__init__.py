"""Names of models: where each lies on this machine, how it comes from the Hugging Face hub, and what came wrongly."""
