"""The engines that enforce a constraint: our automata, llguidance, or one that they are compared with."""
