"""Who enforces a constraint: our automata, llguidance, or one of the engines they are compared with."""
