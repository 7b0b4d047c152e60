"""Why a call found no more of its prompt in the cache: what is noted while programs run, and the answer."""
