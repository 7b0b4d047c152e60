"""Chat templates that want more time or memory than a template may have, or that break the one who renders them."""

_DAG = "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
_TWICE = "{% set ns = namespace(a='ab', n=7) %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}"
_SQUARES = "{% set ns = namespace(n=7) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}"
_LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}"
_ENDS = "{% endfor %}{% endfor %}"
_BIG = "{% set t = 'ab' * 4000000 %}"
_SAID = "{{ messages[0].content }}"

# Each ends with a limit or an error, never with text.
BOMBS = {
    # Python code that goes on
    "nested loops": _LOOP + _ENDS + _SAID,
    "loops that write": _LOOP + "x" + _ENDS,
    "loops that count": "{% set ns = namespace(n=0) %}" + _LOOP + "{% set ns.n = ns.n + 1 %}" + _ENDS + _SAID,
    "three loops": _LOOP + "{% for k in range(99999) %}{% endfor %}" + _ENDS + _SAID,
    "loop with a filter": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}"
    + _SAID,
    "macro in a loop": "{% macro m() %}{% for i in range(99999) %}{% endfor %}{% endmacro %}"
    "{% for i in range(99999) %}{{ m() }}{% endfor %}" + _SAID,
    "macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "caller": "{% macro m() %}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 15
    + _LOOP
    + _ENDS
    + "{% endcall %}" * 15,
    "map over a range": "{{ range(99999) | map('string') | map('replace', '1', 'a' * 9999) | join | length }}",
    "batch of batches": _LOOP + "{{ range(9999) | batch(1) | list | length }}" + _ENDS,
    "sort": "{% for i in range(99999) %}{% set x = range(99999) | sort(reverse=true) | list %}{% endfor %}" + _SAID,
    "unique": "{% for i in range(99999) %}{% set x = range(99999) | unique | list %}{% endfor %}" + _SAID,
    "groupby": "{% for i in range(9999) %}{% set x = messages * 9999 | groupby('role') | list %}{% endfor %}" + _SAID,
    "sum": "{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}" + _SAID,
    "cycler": "{% set c = cycler(1, 2) %}" + _LOOP + "{{ c.next() and '' }}" + _ENDS,
    "dictionaries": _LOOP + "{% set d = dict(a=1, b=2) %}" + _ENDS + _SAID,
    "break that never comes": _LOOP + "{% if j < 0 %}{% break %}{% endif %}" + _ENDS + _SAID,
    "urlize": "{{ ('http://a.' * 200000) | urlize }}{{ ('www.(' * 400000) | urlize }}",
    "striptags": "{{ ('<!--' * 2000000) | striptags }}",
    "wordwrap": "{{ ('a ' * 4000000) | wordwrap(1) }}",
    "tests in loops": _LOOP + "{% if i is divisibleby 7 and j is even %}{% endif %}" + _ENDS + _SAID,
    "lipsum": "{{ lipsum(n=100000000) }}",
    "random": _LOOP + "{% set x = [1, 2] | random %}" + _ENDS + _SAID,
    # one operation that takes it all
    "times": "{{ 'a' * 4000000000 }}",
    "times, the other way": "{{ 4000000000 * 'a' }}",
    "times a list": "{{ ([0] * 4000000000) | length }}",
    "times a tuple": "{{ ((0,) * 4000000000) | length }}",
    "times, of a variable": "{% set n = 4000000000 %}{{ messages[0].role * n }}",
    "times, folded in a branch": "{% if false %}{{ 'a' * 4000000000 }}{% endif %}" + _BIG + "{{ t }}",
    "times times": "{{ ('a' * 100000) * 100000 }}",
    "power": "{{ 7 ** (9 ** 9) }}",
    "power of a variable": "{% set n = 999999999 %}{{ (7 ** n) % 10 }}",
    "squares": _SQUARES + "{{ ns.n % 10 }}",
    "digits": "{{ (10 ** 400000) | string }}",
    "round": "{{ 1.5 | round(100000000) }}{{ (10 ** 100000000) | round }}",
    "doubling": _TWICE + "{{ ns.a }}",
    "doubling by join": "{% set ns = namespace(a='ab') %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] | join %}{% endfor %}",
    "doubling by a block": "{% set ns = namespace(a='ab') %}{% for i in range(60) %}"
    "{% set x %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = x %}{% endfor %}",
    "doubling by replace": "{% set ns = namespace(a='ab') %}{% for i in range(60) %}"
    "{% set ns.a = ns.a | replace('a', 'aba') %}{% endfor %}",
    "doubling by format": "{% set ns = namespace(a='ab') %}{% for i in range(60) %}"
    "{% set ns.a = '%s%s' | format(ns.a, ns.a) %}{% endfor %}",
    "doubling lists": "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "text of a graph": _DAG + "{{ ns.a }}",
    "JSON of a graph": _DAG + "{{ ns.a | tojson }}",
    "graphs compared": _DAG
    + "{% set b = namespace(a=[1]) %}{% for i in range(60) %}{% set b.a = [b.a, b.a] %}{% endfor %}{{ ns.a == b.a }}",
    "pprint of a graph": _DAG + "{{ ns.a | pprint }}",
    "center": "{{ 'a'.center(4000000000) }}",
    "center, the filter": "{{ 'a' | center(4000000000) }}",
    "ljust": "{{ 'a'.ljust(4000000000) }}",
    "zfill": "{{ 'a'.zfill(4000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "percent": "{{ '%4000000000d' % 1 }}",
    "percent of a variable": "{% set n = 1 %}{{ '%2000000000s' % n }}",
    "format": "{{ '{:>4000000000}'.format(1) }}",
    "format of a format": "{{ '{:>{n}}'.format(1, n=4000000000) }}",
    "the filter format": "{{ '%2000000000d' | format(1) }}",
    "replace": _BIG + "{{ t | replace('a', t) }}",
    "the method replace": _BIG + "{{ t.replace('', t) }}",
    "join": _BIG + "{{ t | join(t) }}",
    "the method join": _BIG + "{{ t.join(t) }}",
    "indent": "{{ ('\n' * 1000000) | indent(1000000) }}",
    "split": _BIG + "{{ (t * 10).split('a') | length }}",
    "list": _BIG + "{{ (t * 10) | list | length }}",
    "slice": "{{ range(99999) | slice(1000000000) | list }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "tojson": "{{ messages | tojson(indent=2000000000) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "escape": "{{ ('<' * 60000000) | escape }}",
    "urlencode": "{{ ('<' * 90000000) | urlencode }}",
    "strftime_now": "{{ strftime_now('%2000000000Y') }}",
    "strftime_now, long": "{{ strftime_now('%c' * 9000000) }}",
    "range": "{{ range(10 ** 10) | list }}",
    "range of steps": "{{ range(0, 10 ** 18, 1) | sum }}",
    # compiling
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "lists in lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "minus minus": "{{ " + "-" * 50000 + "1 }}",
    "not not": "{{ " + "not " * 50000 + "1 }}",
    "sums": "{{ " + "1 + " * 50000 + "1 }}",
    "filters": "{{ 1 " + "| string " * 50000 + "}}",
    "blocks in blocks": "{% if true %}" * 5000 + "{% endif %}" * 5000,
    "loops in loops": "{% for a in [1] %}" * 500 + "{% endfor %}" * 500,
    "chains": "{{ " + "messages." + "a." * 50000 + "b }}",
    "else ifs": "{% if 0 %}" + "{% elif 0 %}" * 20000 + "{% endif %}",
    "digits of a number": "{{ 1" + "0" * 100000 + " }}",
    "many variables": "".join(f"{{% set v{i} = {i} %}}" for i in range(40000)),
    "folding": "{{ ('a' * 100000000) ~ ('b' * 100000000) ~ ('c' * 100000000) }}",
    # errors
    "a long reason": "{{ raise_exception('a' * 900000) }}",
    "no text for a reason": "{{ raise_exception(7) }}",
    "no exit": "{{ ''.__class__.__base__.__subclasses__() }}",
    "imports": "{% import 'os' as os %}",
    "includes": "{% include '/etc/passwd' %}",
    "extends": "{% extends '/etc/passwd' %}",
    "division": "{{ 1 / 0 }}",
    "overflow": "{{ 2.0 ** 100000 }}",
    "type": "{{ messages + 'a' }}",
    "key": "{{ messages['a']['b']['c'] }}",
    "index": "{{ messages | first | attr('x') | list | last + 1 }}",
    "no filter": "{{ 1 | nothing }}",
    "no call": "{{ messages() }}",
    "half a pair": "{{ '\\ud800' }}",
    "all alike": "{{ bos_token }}{% if add_generation_prompt %}go on{% endif %}",
    "lengths only": "{% for m in messages %}{{ m.role }}{% endfor %}",
}
