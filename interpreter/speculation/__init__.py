"""API speculative execution (section 5 of the SGLang paper): one paid call answers what the program asks next, too.

    prompt ──► call without stops ──► "Harry\\nJob: wizard\\nAge: 11\\n..."
                                       name         job          age
    name       ends at its stop; what is after it is the surplus of this stream
    "\\nJob: "  constant text of the program: it has to stand at the beginning of the surplus
    job, age   answered from the surplus, if it is certain where they end; no calls

The law: where a provider's text is a function of the text before it, and how it cuts text into tokens does not depend
on where the prompt ends, every variable is what the plain run makes it. Anything that is not certain (another text than
the program's, no end in sight, other sampling parameters, an image, another turn) drops the surplus, and the plain call
is made from that place. A constrained `gen` that the provider does not enforce gets a text that satisfies it.

Draws from a seed are left alone: a call of its own begins the seed's draws anew, a surplus goes on with them.

    replies     the text of one call: finds the end of a gen in it, keeps the rest, and matches it with the stream
    planner     collects the steps queued after a gen, and decides whether more text is worth its price
    speculator  all of these, for one stream
"""
