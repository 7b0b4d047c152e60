"""What a run or a batch needs, known before it runs: common heads, memory, the longest way."""
