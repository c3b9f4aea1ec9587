"""Bodies made to cost a server much, which tests/bench/hostile.py sends."""

import json


def nested(n, begin, middle, end):
    return begin * n + middle + end * n


def many(n, make, join=","):
    return join.join(make(i) for i in range(n))


def defs(n, make, first="d0"):
    return '{"$ref":"#/$defs/%s","$defs":{"d%d":{},%s}}' % (
        first,
        n,
        many(n, lambda i: f'"d{i}":' + make(f'{{"$ref":"#/$defs/d{i + 1}"}}', i)),
    )


def schemas():
    """Name and text of schemas."""
    yield "20,000 brackets", nested(20000, "[", "", "]")
    yield "20,000 items", nested(20000, '{"items":', "{}", "}")
    yield "100 items", nested(100, '{"items":', "{}", "}")
    yield "allOf, 60 deep", nested(60, '{"allOf":[{},', "{}", "]}")
    yield "anyOf, 2^60", nested(60, '{"anyOf":[{"type":"null"},', "{}", "]}")
    yield "anyOf of itself twice, 2^60", defs(
        60,
        lambda next, i: (
            f'{{"anyOf":[{{"type":"array","items":{next}}},'
            f'{{"type":"object","properties":{{"a":{next}}}}}]}}'
        ),
    )
    yield "allOf of 40 anyOf", '{"type":"object","allOf":[%s]}' % many(
        40, lambda i: f'{{"anyOf":[{{"required":["a{i}"]}},{{"required":["b{i}"]}}]}}'
    )
    yield "oneOf of 60", '{"oneOf":[%s]}' % many(
        60, lambda i: f'{{"properties":{{"p{i}":{{"minimum":{i}}},"q":{{"type":"string"}}}}}}'
    )
    yield "not oneOf of 60", '{"not":{"oneOf":[%s]}}' % many(
        60, lambda i: f'{{"properties":{{"p{i}":{{"minimum":{i}}}}}}}'
    )
    yield "if, 60 deep", nested(
        60, '{"if":{"required":["a"]},"then":{"required":["b"]},"else":', "{}", "}"
    )
    yield (
        "maxItems 10^9 of 50 patterns",
        '{"type":"array","maxItems":1000000000,"items":{"type":"object","properties":{%s}}}'
        % many(50, lambda i: f'"p{i}":{{"type":"string","pattern":"^(a|b){{1,500}}$"}}'),
    )
    yield "minItems 10^8", '{"type":"array","items":{"type":"integer"},"minItems":100000000}'
    yield "maxItems in maxItems, 60", nested(60, '{"maxItems":100000,"items":', "{}", "}")
    yield "minLength 2^53", '{"type":"string","minLength":9007199254740992}'
    yield "maxLength 2^53", '{"type":"string","maxLength":9007199254740992}'
    yield (
        "minLength 100,000 of a pattern",
        '{"type":"string","minLength":100000,"pattern":"^(ab|c+d)*$"}',
    )
    yield "multipleOf 10^-300", '{"multipleOf":1e-300}'
    yield "multipleOf of 300", '{"allOf":[%s]}' % many(
        300, lambda i: f'{{"type":"integer","multipleOf":1{i}7}}'
    )
    yield (
        "multipleOf 65,521 between bounds",
        '{"type":"integer","multipleOf":65521,"minimum":-1000000007,"maximum":1000000000000007}',
    )
    yield "a bound of 200,000 digits", '{"minimum":1%s}' % ("0" * 200000)
    yield "enum of 100,000", '{"enum":[%s]}' % many(100000, lambda i: f'"v{i}"')
    yield "enum of 40,000", '{"enum":[%s]}' % many(40000, lambda i: f'"v{i}"')
    yield "enum of 5,000 objects", '{"enum":[%s]}' % many(
        5000, lambda i: f'{{"a":{{"b":{i}}},"c":[{i}]}}'
    )
    yield "const of 500 KB", '{"const":"%s"}' % ("a" * 500000)
    yield "const of 100,000 numbers", '{"const":[%s]}' % many(100000, str)
    yield "const, 100 deep", '{"const":%s}' % nested(100, '{"a":', "1", "}")
    yield "uniqueItems of an enum of 40", '{"uniqueItems":true,"items":{"enum":[%s]}}' % many(
        40, lambda i: f'"v{i}"'
    )
    yield "uniqueItems of an enum of 20,000", '{"uniqueItems":true,"items":{"enum":[%s]}}' % many(
        20000, lambda i: f'"v{i}"'
    )
    yield "contains among 5,000", '{"contains":{"const":1},"prefixItems":[%s]}' % many(
        5000, lambda i: f'{{"minimum":{i}}}'
    )
    yield (
        "minContains 10^9",
        '{"contains":{"type":"integer"},"minContains":1000000000,"maxContains":2000000000}',
    )
    yield "100,000 $ref", '{"properties":{%s},"$defs":{"a":{"type":"string"}}}' % many(
        100000, lambda i: f'"p{i}":{{"$ref":"#/$defs/a"}}'
    )
    yield "12,000 $ref", '{"properties":{%s},"$defs":{"a":{"type":"string"}}}' % many(
        12000, lambda i: f'"p{i}":{{"$ref":"#/$defs/a"}}'
    )
    yield "$ref to itself", '{"$ref":"#"}'
    yield (
        "a ring of 500 $ref",
        '{"$ref":"#/$defs/d0","$defs":{"d500":{"$ref":"#/$defs/d0"},%s}}'
        % many(500, lambda i: f'"d{i}":{{"$ref":"#/$defs/d{i + 1}"}}'),
    )
    yield "a chain of 5,000 $ref", defs(5000, lambda next, i: f'{{"properties":{{"x":{next}}}}}')
    yield "a chain of 10,000 bare $ref", defs(10000, lambda next, i: next)
    yield "doubling by $ref", defs(
        60, lambda next, i: f'{{"type":"array","prefixItems":[{next},{next}],"minItems":2}}'
    )
    yield "doubling by allOf", defs(60, lambda next, i: f'{{"allOf":[{next},{next}]}}')
    yield "allOf of itself and another", '{"$ref":"#/$defs/d0","$defs":{"d30":{},%s}}' % many(
        30,
        lambda i: (
            f'"d{i}":{{"allOf":[{{"properties":{{"x":{{"$ref":"#/$defs/d{i + 1}"}}}}}},'
            '{"properties":{"x":{"$ref":"#/$defs/d0"}}}]}'
        ),
    )
    yield "no sentence", '{"type":"object","required":["a"],"properties":{"a":{"$ref":"#"}}}'
    yield "properties, 15,000", '{"properties":{%s}}' % many(
        15000, lambda i: f'"p{i}":{{"type":"string"}}'
    )
    yield "properties, 15,000 required", '{"properties":{%s},"required":[%s]}' % (
        many(12000, lambda i: f'"p{i}":{{"type":"string"}}'),
        many(12000, lambda i: f'"p{i}"'),
    )
    yield "required, 40,000", '{"type":"object","required":[%s]}' % many(40000, lambda i: f'"p{i}"')
    yield "maxProperties 150 of 300", '{"maxProperties":150,"properties":{%s}}' % many(
        300, lambda i: f'"p{i}":{{}}'
    )
    yield "patternProperties, 40", '{"patternProperties":{%s}}' % many(
        40, lambda i: f'"x{i}":{{"minimum":{i}}}'
    )
    yield "patternProperties, 5,000", '{"patternProperties":{%s}}' % many(
        5000, lambda i: f'"^x{i}":{{"minimum":{i}}}'
    )
    yield "propertyNames", '{"type":"object","propertyNames":{"pattern":"^(a|b)*a(a|b){300}$"}}'
    yield "dependentSchemas, 40", '{"dependentSchemas":{%s}}' % many(
        40, lambda i: f'"x{i}":{{"properties":{{"y":{{"minimum":{i}}}}}}}'
    )
    yield "dependentRequired, 2,000", '{"dependentRequired":{%s}}' % many(
        2000, lambda i: f'"p{i}":["p{i + 1}"]'
    )
    yield "pattern {1000}{1000}", '{"type":"string","pattern":"^(a{1000}){1000}$"}'
    yield "pattern (a|b)*a(a|b){5000}", '{"type":"string","pattern":"^(a|b)*a(a|b){5000}$"}'
    yield "60 patterns together", '{"type":"string","allOf":[%s]}' % many(
        60, lambda i: f'{{"pattern":"a.{{{i}}}b"}}'
    )
    yield "pattern of Unicode", '{"type":"string","pattern":"^%s$"}' % (
        "[\\\\p{L}\\\\p{N}]{9}[^\\\\p{Lu}]" * 2000
    )
    yield "format, 3,000", '{"properties":{%s}}' % many(
        3000, lambda i: f'"p{i}":{{"type":"string","format":"date-time"}}'
    )


def expressions():
    yield "20,000 groups", nested(20000, "(", "a", ")")
    yield "stars of stars", "((a*)*)*" * 2000
    yield "stars of stars of stars", nested(100, "(", "a", "*)*")
    yield "{1000} of {1000} of {1000}", "((a{1000}){1000}){1000}"
    yield "{1,9} of {1,9}, 100", nested(100, "(", "a", "{1,9}){1,9}")
    yield "{10^6} of {10^6}", "(a{1000000}b?){1000000}"
    yield "(a|b)*a(a|b){1000}", "(a|b)*a(a|b){1000}"
    yield ".*x, 300", ".*x" * 300
    yield "optional ones, 20,000", "a?" * 20000 + "a" * 20000
    yield "may be empty, 2,000", "(a?b?)" * 2000
    yield "alternatives, 50,000", many(50000, lambda i: f"abc{i}", "|")
    yield "alternatives, 1 MB", many(100000, lambda i: f"abc{i}def", "|")
    yield "a class of 400 KB", "[%s]" % many(100000, lambda i: chr(0x4E00 + i * 7 % 20000), "")
    yield "Unicode properties", "\\p{L}{9}[^\\p{N}]" * 2000
    yield "Unicode properties, counted", "(\\p{L}|\\p{N}\\p{M}){1000}\\p{Lu}"
    yield "a text of 400 KB", "a" * 400000
    yield "lookahead", "(?=a)b"


def grammars():
    yield "20,000 groups", "start: " + nested(20000, "(", '"a"', ")")
    yield "ambiguity", 'start: "a"' + "|start start" * 2000
    yield "20,000 rules", 'start: r0\nr20000: "x"\n' + many(
        20000, lambda i: f'r{i}: "a" r{i + 1} | "b"\n', ""
    )
    yield "rules of no text", 'start: r0\nr1000: "x"\n' + many(
        1000, lambda i: f"r{i}: r{i + 1} r{i + 1} |\n", ""
    )
    yield "optional rules", 'start: a\na: "x"' + " a?" * 20000
    yield "r{1000000}", 'start: r{1000000}\nr: "(" r? ")"'
    yield "left recursion", 'start: start start start "a" | start start |'
    yield "a rule of itself", "start: a\na: b\nb: a"
    yield "alternatives, 400 KB", "start: " + many(40000, lambda i: f'"x{i}"', "|")
    yield "terminals, 10,000", "start: " + many(10000, lambda i: f"T{i}", "|") + "\n" + many(
        10000, lambda i: f"T{i}: /a{i}b*/", "\n"
    )
    yield "a terminal of many", "start: T\nT: /(a|b)*a(a|b){1000}/"
    yield "1 MB of no meaning", "\x7f" * 1000000


def structured():
    """Bodies of /v1/completions."""
    for name, text in schemas():
        yield "schema: " + name, '"structured_outputs":{"json":%s}' % text
    for name, text in expressions():
        yield "regex: " + name, '"structured_outputs":{"regex":%s}' % json.dumps(text)
    for name, text in grammars():
        yield "grammar: " + name, '"structured_outputs":{"grammar":%s}' % json.dumps(text)
    yield "choice: 1 MB", '"structured_outputs":{"choice":[%s]}' % many(
        50000, lambda i: f'"choice number {i}"'
    )
    yield "choice: 400 KB", '"structured_outputs":{"choice":[%s]}' % many(
        20000, lambda i: f'"choice number {i}"'
    )
    yield "choice: one of 1 MB", '"structured_outputs":{"choice":["%s"]}' % ("a" * 1000000)
    yield "choice: 1,000 of 400 equal bytes", '"structured_outputs":{"choice":[%s]}' % many(
        1000, lambda i: '"%s%d"' % ("a" * 400, i)
    )
    yield "choice: 200,000 of nothing", '"structured_outputs":{"choice":[%s]}' % many(
        200000, lambda i: '""'
    )
    tags = '"structured_outputs":{"structural_tag":{"structures":[%s],"triggers":[%s]}}'
    yield "tags: 10,000", tags % (
        many(10000, lambda i: f'{{"begin":"<n{i}=","schema":{{"type":"integer"}},"end":">"}}'),
        '"<n"',
    )
    yield "tags: 10,000 triggers", tags % (
        '{"begin":"<n=","schema":{},"end":">"}',
        many(10000, lambda i: f'"<n{i}"'),
    )
    yield "tags: 1,000, each of a hostile schema", tags % (
        many(1000, lambda i: f'{{"begin":"<n{i}=","schema":{HOSTILE},"end":">"}}'),
        '"<n"',
    )
    yield "tags: a beginning of 500 KB", tags % (
        '{"begin":"<n%s","schema":{},"end":">"}' % ("a" * 500000),
        '"<n"',
    )


# Takes the work that one schema may, with little text.
HOSTILE = '{"type":"object","allOf":[%s]}' % many(
    9, lambda i: f'{{"anyOf":[{{"required":["a{i}"]}},{{"required":["b{i}"]}}]}}'
)
HELLO = '"messages":[{"role":"user","content":"x"}]'


def tool(i, parameters='{"type":"object"}', strict="false"):
    return (
        f'{{"type":"function","function":{{"name":"t{i}","strict":{strict},'
        f'"parameters":{parameters}}}}}'
    )


def chats():
    for n in (10000, 512):
        for choice in ("auto", "required"):
            yield f"tools: {n:,}, {choice}", HELLO + ',"tool_choice":"%s","tools":[%s]' % (
                choice,
                many(n, tool),
            )
    for strict in ("false", "true"):
        yield (
            f"tools: 512, each of a hostile schema, strict {strict}",
            HELLO
            + ',"tool_choice":"required","tools":[%s]'
            % many(512, lambda i: tool(i, HOSTILE, strict)),
        )
        yield (
            f"tools: 200, each of another hostile schema, strict {strict}",
            HELLO
            + ',"tool_choice":"required","tools":[%s]'
            % many(200, lambda i: tool(i, HOSTILE.replace("a0", f"c{i}"), strict)),
        )
        yield (
            f"tools: 512, each of a costly pattern, strict {strict}",
            HELLO
            + ',"tool_choice":"required","tools":[%s]'
            % many(
                512,
                lambda i: tool(
                    i,
                    '{"properties":{"a":{"type":"string","pattern":"^(a|b)*a(a|b){%d}$"}}}'
                    % (900 + i),
                    strict,
                ),
            ),
        )
        yield (
            f"tools: 512, each of 900 properties, strict {strict}",
            HELLO
            + ',"tool_choice":"required","tools":[%s]'
            % many(
                512,
                lambda i: tool(
                    i, '{"properties":{%s}}' % many(900, lambda k: f'"p{k}":{{}}'), strict
                ),
            ),
        )
        yield (
            f"tools: 512, one refused, strict {strict}",
            HELLO
            + ',"tool_choice":"required","tools":[%s]'
            % many(
                512,
                lambda i: tool(
                    i,
                    '{"properties":{%s}}'
                    % (
                        many(60, lambda k: f'"p{k}":{{"type":"string","maxLength":{i + k}}}')
                        if i
                        else '"a":{"$dynamicAnchor":1}'
                    ),
                    strict,
                ),
            ),
        )
    yield "tools: one name, 512", HELLO + ',"tools":[%s]' % many(512, lambda i: tool(7))
    yield "tools: 512 descriptions of 10 KB", HELLO + ',"tools":[%s]' % many(
        512, lambda i: tool(i).replace('"strict"', '"description":"%s","strict"' % ("a b" * 3300))
    )
    for n in (100000, 4096):
        yield f"messages: {n:,}", '"messages":[%s]' % many(
            n, lambda i: '{"role":"user","content":""}'
        )
        yield f"messages: {n:,} system", '"messages":[%s]' % many(
            n, lambda i: '{"role":"system","content":""}'
        )
    yield "parts: 100,000", '"messages":[{"role":"user","content":[%s]}]' % many(
        100000, lambda i: '{"type":"text","text":""}'
    )
    yield (
        "tool_calls: 8,000",
        '"messages":[{"role":"user","content":""},{"role":"assistant","tool_calls":[%s]}]'
        % many(
            8000,
            lambda i: (
                f'{{"id":"c{i}","type":"function","function":{{"name":"a","arguments":"{{}}"}}}}'
            ),
        ),
    )
    yield "chat_template_kwargs: 100,000", HELLO + ',"chat_template_kwargs":{%s}' % many(
        100000, lambda i: f'"a{i}":1'
    )
    yield "members: 100,000", HELLO + "," + many(100000, lambda i: f'"a{i}":1')
    yield "logit_bias: 100,000", HELLO + ',"logit_bias":{%s}' % many(100000, lambda i: f'"{i}":1')
    yield "brackets: 8 MB", '"messages":' + "[" * 8000000


def responses():
    yield "items: 100,000", '"input":[%s]' % many(100000, lambda i: '{"role":"user","content":""}')
    yield "items: 4,096", '"input":[%s]' % many(4096, lambda i: '{"role":"user","content":""}')
    yield "calls: 50,000", '"input":[%s]' % many(
        50000,
        lambda i: f'{{"type":"function_call","call_id":"c{i}","name":"a","arguments":"{{}}"}}',
    )
    yield "outputs: 50,000", '"input":[%s]' % many(
        50000, lambda i: f'{{"type":"function_call_output","call_id":"c{i}","output":""}}'
    )
    yield "calls and outputs: 4,000", '"input":[%s]' % many(
        2000,
        lambda i: (
            f'{{"type":"function_call","call_id":"c{i}","name":"a","arguments":"{{}}"}},'
            f'{{"type":"function_call_output","call_id":"c{i}","output":""}}'
        ),
    )
    yield "reasoning: 100,000", '"input":[%s]' % many(
        100000, lambda i: '{"type":"reasoning","summary":[]}'
    )
    yield "parts: 100,000", '"input":[{"role":"user","content":[%s]}]' % many(
        100000, lambda i: '{"type":"input_text","text":""}'
    )
    yield "tools of other types: 100,000", '"input":"x","tools":[%s]' % many(
        100000, lambda i: f'{{"type":"t{i}"}}'
    )
    yield (
        "allowed tools: 10,000 of 10,000",
        '"input":"x","tools":[%s],"tool_choice":{"type":"allowed_tools","mode":"auto","tools":[%s]}'
        % (
            many(10000, lambda i: f'{{"type":"function","name":"t{i}"}}'),
            many(10000, lambda i: f'{{"type":"function","name":"s{i}"}}'),
        ),
    )
    yield "include: 100,000", '"input":"x","include":[%s]' % many(100000, lambda i: '"a"')
    yield "metadata: 100,000", '"input":"x","metadata":{%s}' % many(100000, lambda i: f'"a{i}":"b"')
    yield (
        "a hostile format",
        '"input":"x","text":{"format":{"type":"json_schema","name":"a","strict":true,"schema":%s}}'
        % HOSTILE,
    )


def messages():
    one = '"max_tokens":1,"messages":[{"role":"user","content":"x"}]'
    yield "messages: 100,000", '"max_tokens":1,"messages":[%s]' % many(
        100000, lambda i: '{"role":"user","content":""}'
    )
    yield "messages: 4,096", '"max_tokens":1,"messages":[%s]' % many(
        4096, lambda i: '{"role":"user","content":""}'
    )
    yield "system blocks: 100,000", one + ',"system":[%s]' % many(
        100000, lambda i: '{"type":"text","text":"a"}'
    )
    yield "attribution headers: 50,000", one + ',"system":[%s]' % many(
        50000, lambda i: '{"type":"text","text":"x-anthropic-billing-header: a"}'
    )
    yield (
        "tool_use: 50,000",
        '"max_tokens":1,"messages":[{"role":"assistant","content":[%s]}]'
        % many(50000, lambda i: f'{{"type":"tool_use","id":"c{i}","name":"a","input":{{}}}}'),
    )
    yield (
        "tool_result: 50,000",
        '"max_tokens":1,"messages":[{"role":"user","content":[%s]}]'
        % many(50000, lambda i: f'{{"type":"tool_result","tool_use_id":"c{i}"}}'),
    )
    yield (
        "thinking: 50,000",
        '"max_tokens":1,"messages":[{"role":"assistant","content":[%s]}]'
        % many(50000, lambda i: '{"type":"thinking","thinking":"a"}'),
    )
    yield "tools: 10,000", one + ',"tools":[%s]' % many(
        10000, lambda i: f'{{"name":"t{i}","input_schema":{{}}}}'
    )
    yield (
        "tools of other types: 100,000, one chosen",
        one
        + ',"tool_choice":{"type":"tool","name":"a"},"tools":[%s]'
        % many(100000, lambda i: f'{{"type":"t{i}","name":"b"}}'),
    )
    yield "stop sequences: 100,000", one + ',"stop_sequences":[%s]' % many(100000, lambda i: '"a"')
    yield (
        "a hostile format",
        one + ',"output_config":{"format":{"type":"json_schema","schema":%s}}' % HOSTILE,
    )


def bodies():
    """Name, route and body."""
    for name, text in structured():
        yield name, "/v1/completions", '{"prompt":"x","max_tokens":2,%s}' % text
    for name, text in chats():
        yield "chat: " + name, "/v1/chat/completions", '{"max_tokens":2,%s}' % text
    for name, text in responses():
        yield "responses: " + name, "/v1/responses", '{"max_output_tokens":2,%s}' % text
    for name, text in messages():
        yield "messages: " + name, "/v1/messages", "{%s}" % text
