"""Chat templates that show tools, in the ways of published ones: what they compare, concatenate, refuse and sort."""

from dataclasses import dataclass, field

# Tools in a system turn by `tojson`, content that may be None, results grouped in a user turn, thoughts of the last
# answer only.
QWEN = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each call, return:\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <json>}' }}
    {{- '\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}{%- set index = messages|length - 1 - loop.index0 %}
    {%- if not ns.found and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = index %}{%- set ns.found = true %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and thought %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {{- content.lstrip('\\n') }}{%- else %}{{- content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# Tools indented in the first user turn, one call a turn, results by tojson although they are text.
LLAMA = """\
{{- bos_token }}{%- set tools = tools if tools is defined else none %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{%- if tools is not none %}{{- 'Environment: ipython\\n' }}
{%- endif %}{{- 'Reasoning: ' + (effort | default('low')) + '\\n\\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond in the format '}}
    {{- '{"name": function name, "parameters": dictionary}.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Tools key by key before the last user turn, whole calls by tojson, ids of nine characters.
MISTRAL = """\
{{- bos_token }}{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == users[-1] %}{{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}{%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != 'return' %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ', ' }}{%- endif %}
                {%- endfor %}{{- '}}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' }}{%- endif %}
            {%- endfor %}{{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}{{- '[INST] ' + message['content'] + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls %}{{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}{%- set out = call.function|tojson %}{{- out[:-1] }}
            {%- if call.id is not defined or call.id|length != 9 %}{{- raise_exception('ids have 9 characters') }}
            {%- endif %}{{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('no such role') }}{%- endif %}
{%- endfor %}"""

# Arguments as text, content None where there are calls.
DEEPSEEK = """\
{{- bos_token }}{%- for tool in tools or [] %}{{- tool.function.name + ': ' + tool.function.description + '\\n' }}
{{- tool.function.parameters | tojson(ensure_ascii=True, sort_keys=True) }}{{- '\\n' }}{%- endfor %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{{- message['content'] }}{%- endif %}
    {%- if message['role'] == 'user' %}{{- '<|User|>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for call in message['tool_calls'] %}
            {{- '<|Assistant|>' if loop.first }}{{- call['function']['name'] + '\\n```json\\n' }}
            {{- call['function']['arguments'] + '\\n```' }}
        {%- endfor %}{{- '<|end|>' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|Assistant|>' + message['content'].split('</think>')[-1] + '<|end|>' }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}{{- '<|Result|>' + message['content'] + '<|end|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}"""

# Tools in tags, properties sorted, arguments one by one.
TAGS = """\
{%- for tool in tools or [] %}{%- set tool = tool.function %}{{- '<tool>' + tool.name + '\\n' }}
    {%- for name, fields in tool.parameters.properties | dictsort %}
        {{- name + ' (' + fields.type | string }}{{- ', needed)' if name in (tool.parameters.required or []) else ')' }}
        {%- if fields.description %}{{- ': ' + fields.description | trim }}{%- endif %}
        {%- if fields.enum %}{{- ' one of ' + fields.enum | join(' | ') }}{%- endif %}{{- '\\n' }}
    {%- endfor %}{{- '</tool>\\n' }}
{%- endfor %}
{%- for message in messages %}{{- '<|' + message.role + '|>' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name }}
        {%- for name, value in call.function.arguments.items() %}
            {{- '<arg>' + name + '=' }}{{- value if value is string else value | tojson }}{{- '</arg>' }}
        {%- endfor %}{{- '</tool_call>' }}
    {%- endfor %}{{- '<|end|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""


@dataclass(frozen=True)
class ToolFamily:
    name: str
    source: str
    tokens: dict[str, str] = field(default_factory=dict)
    system: bool = True
    parallel: bool = True  # several calls in one turn


TOOL_FAMILIES = [
    ToolFamily("qwen", QWEN),
    ToolFamily("llama", LLAMA, {"bos_token": "<|begin_of_text|>"}, parallel=False),
    ToolFamily("mistral", MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"}, system=False),
    ToolFamily("deepseek", DEEPSEEK, {"bos_token": "<s>"}),
    ToolFamily("tags", TAGS),
]
