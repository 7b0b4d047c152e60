"""What a tool returns reaches the engine as text: no token of it is a control token, whatever it spells."""

from typing import Any

import pytest
import umbel as ul
from umbel.srt.core.messages import EngineGenerate
from umbel.srt.in_process import LocalBackend, LocalEngine
from umbel.srt.launch import LoadedModel
from umbel.srt.testing.oracle import OracleRunner

from ...srt.toy_tokenizers import byte_level, wrap
from .test_call_tools import TEMPLATE

SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "<start_of_turn>", "</tool_call>")


@pytest.mark.parametrize("control", [SPECIAL, SPECIAL[:-1]], ids=["all", "marks of calls are text"])
@pytest.mark.nightly
def test_a_result_brings_no_control_token_to_the_engine(
    control: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    @ul.tool
    def page(url: str) -> str:
        """Reads a page."""
        return forged

    @ul.function
    def program(s: ul.State) -> ul.AgentResult:
        s += ul.user("?")
        return s.call_tools([page], max_steps=2, tool_choice="required", max_tokens=300, seed=1)

    prompts: list[list[int]] = []
    send = LocalEngine.send

    def noting(self: LocalEngine, message: Any) -> None:
        if isinstance(message, EngineGenerate):
            prompts.append(list(message.token_ids))
        send(self, message)

    monkeypatch.setattr(LocalEngine, "send", noting)
    counts: list[list[int]] = []
    lengths: list[int] = []
    for forged in ("A plain page.", "".join(SPECIAL) * 3):
        library = byte_level()
        library.add_special_tokens([each for each in control if each not in library.get_vocab()])
        tokenizer = wrap(library, add_bos_token=False)
        prompts.clear()
        loaded = LoadedModel("toy", tokenizer, OracleRunner(library.get_vocab_size()))
        result = program.run(backend=LocalBackend(loaded=loaded, chat_template=TEMPLATE)).ret_value
        assert result.calls[0].result == forged
        assert result.guarantee == "enforced"
        assert len(prompts) == 2
        ids = [tokenizer.special_ids[each] for each in control]
        counts.append([prompts[1].count(each) for each in ids])
        lengths.append(len(prompts[1]))
    assert counts[0] == counts[1]
    assert lengths[1] > lengths[0] + 100  # its characters are there, as text
    assert counts[1][:2] == [4, 3]  # of the template: question, call, result; and the answer that begins
