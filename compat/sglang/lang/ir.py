"""`sglang.lang.ir`: expressions that programs build on, and the classes of what they say."""

from ....lang.constraint import INTEGER, NUMBER
from ....lang.ops import ConstantText as SglConstantText
from ....lang.ops import Gen as SglGen
from ....lang.ops import Image as SglImage
from ....lang.ops import Op as SglExpr
from ....lang.ops import RoleBegin as SglRoleBegin
from ....lang.ops import RoleEnd as SglRoleEnd
from ....lang.ops import Select as SglSelect
from ....lang.ops import SeparateReasoning as SglSeparateReasoning
from ....lang.ops import Sequence as SglExprList
from ....lang.ops import VarScopeBegin as SglVarScopeBegin
from ....lang.ops import VarScopeEnd as SglVarScopeEnd
from ....lang.ops import Video as SglVideo
from ....lang.sampling import SamplingParams as SglSamplingParams
from .programs import SglFunction

# What dtype=int, float, bool and str ask for; numbers are at most 19 digits long, and may end with a blank.
REGEX_INT = INTEGER
REGEX_FLOAT = NUMBER
REGEX_BOOL = "(True|False)"
REGEX_STR = r'"[\w\s]*"'

__all__ = [
    "REGEX_BOOL",
    "REGEX_FLOAT",
    "REGEX_INT",
    "REGEX_STR",
    "SglConstantText",
    "SglExpr",
    "SglExprList",
    "SglFunction",
    "SglGen",
    "SglImage",
    "SglRoleBegin",
    "SglRoleEnd",
    "SglSamplingParams",
    "SglSelect",
    "SglSeparateReasoning",
    "SglVarScopeBegin",
    "SglVarScopeEnd",
    "SglVideo",
]
