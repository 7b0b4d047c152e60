"""Speaks OpenAI's HTTP API: models, completions, chat completions, responses, embeddings; and reranking."""
