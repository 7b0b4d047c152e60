"""JSON schemas drawn by lot, of the kinds that programs write."""

import json
import random
from typing import Any

Schema = dict[str, Any]  # Any: JSON

_PATTERNS = ("^[a-z]{2,5}$", "[0-9]", "^(ab|cd)+", "^\\d{3}-\\d{4}$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
_KEYS = ("name", "age", "kind", "the end", "é", "tags", "in", 'a"b')


def random_schema(dice: random.Random, depth: int = 3) -> Schema:
    kinds = ["integer", "number", "boolean", "null", "string", "enum", "const"]
    if depth:
        kinds += ["object", "object", "array", "anyOf"]
    match dice.choice(kinds if depth < 3 else ["object", "object", "array", "anyOf"]):
        case "integer":
            low = dice.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + dice.randint(0, 500)}
        case "number":
            return {"type": "number", **dice.choice(({}, {"minimum": 0}, {"exclusiveMaximum": 10}))}
        case "string":
            return {
                "type": "string",
                **dice.choice((_length(dice), {"pattern": dice.choice(_PATTERNS)}, _format(dice))),
            }
        case "enum":
            return {"enum": dice.sample(["yes", "no", "the thing", 7, None, True, 2.5, "é\n"], dice.randint(1, 4))}
        case "const":
            return {"const": dice.choice(["one", 1, None, False, 'an "end"'])}
        case "object":
            keys = dice.sample(_KEYS, dice.randint(0, 4))
            return {
                "type": "object",
                "properties": {key: random_schema(dice, depth - 1) for key in keys},
                "required": dice.sample(keys, dice.randint(0, len(keys))),
                "additionalProperties": False,
            }
        case "array":
            least = dice.randint(0, 2)
            schema = {"type": "array", "items": random_schema(dice, depth - 1), "minItems": least}
            return schema | dice.choice(({}, {"maxItems": least + dice.randint(0, 3)}))
        case "anyOf":
            return {"anyOf": [random_schema(dice, depth - 1) for _ in range(dice.randint(1, 3))]}
        case kind:
            return {"type": kind}


def _length(dice: random.Random) -> Schema:
    least = dice.randint(0, 4)
    return dice.choice(({}, {"minLength": least}, {"minLength": least, "maxLength": least + dice.randint(0, 8)}))


def _format(dice: random.Random) -> Schema:
    return {"format": dice.choice(_FORMATS)}


def text_of(schema: Schema) -> str:
    return json.dumps(schema, ensure_ascii=False)
