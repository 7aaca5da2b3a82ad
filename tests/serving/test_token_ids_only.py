"""A model directory without a tokenizer: token ids in, token ids out, and words for everything that needs text."""

import asyncio
import shutil
from pathlib import Path

import pytest
from fake_worker import fake_command

from diptych.control.errors import InvalidRequestError
from diptych.control.request import SamplingParams
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.supervisor import LocalLauncher
from diptych.serving.link.engine_options import BUNDLED_MODEL, EngineOptions


@pytest.mark.system
def test_token_ids_are_served_and_text_is_refused(tmp_path: Path) -> None:
    shutil.copy(BUNDLED_MODEL / "config.json", tmp_path)
    options = EngineOptions(model=str(tmp_path))

    async def main() -> None:
        async with AsyncLLM(options, Fleet(options, launcher=LocalLauncher(fake_command()))) as llm:
            outputs = [output async for output in llm.generate([9, 9], SamplingParams(max_tokens=3))]
            assert (outputs[-1].outputs[0].token_ids, outputs[-1].outputs[0].text) == ([2, 3, 4], "")
            for prompt, sampling in (("text", SamplingParams()), ([9], SamplingParams(stop=("x",)))):
                with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
                    await anext(llm.generate(prompt, sampling))

    asyncio.run(main())
