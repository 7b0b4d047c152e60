"""The noise of the kernels: that of the definition, and rough where it says so."""

import numpy as np
import pytest
import torch
import triton.language as tl
from umbel.srt.kernels.triton.jit import jit
from umbel.srt.kernels.triton.sampling import ROUNDING, most_noise, noise, rough_noise
from umbel.srt.kernels.triton.sampling import token_hash as device_hash
from umbel.srt.sampling.sampler import gumbel, token_hash

# The interpreter says what numpy does about the logarithm of 0: the hash of token 0 under key 0.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

_BLOCK = 1024
_OFFSET = np.log2(np.log(2.0))  # that rough noise leaves out


@jit
def _noises(hashes: tl.tensor, exact: tl.tensor, rough: tl.tensor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    h = tl.load(hashes + at).to(tl.uint32)
    tl.store(exact + at, noise(h))
    tl.store(rough + at, rough_noise(h))


@jit
def _hashes(key: tl.tensor, hashes: tl.tensor, most: tl.tensor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(hashes + at, device_hash(at, tl.load(key)).to(tl.int64))
    tl.store(most + at, most_noise(at, tl.load(key)))


def hashes_of_all_sizes() -> np.ndarray:
    """Small and large ones, those around the switch to the series, and some between."""
    near = np.arange(100)
    ends = np.concatenate([near, 2**25 - 50 + near, 2**32 - 1 - near])
    powers = 2.0 ** np.linspace(0, 31, 256)
    between = np.random.default_rng(0).integers(0, 2**32, _BLOCK - len(ends) - 2 * len(powers))
    return np.concatenate([ends, powers.astype(np.int64), 2**32 - 1 - powers.astype(np.int64), between])


def test_noise_is_that_of_the_definition_and_rough_noise_is_close_where_there_is_enough(device: torch.device) -> None:
    hashes = hashes_of_all_sizes()
    exact = torch.empty(_BLOCK, dtype=torch.float64, device=device)
    rough = torch.empty(_BLOCK, device=device)
    _noises[(1,)](torch.from_numpy(hashes).to(device), exact, rough, BLOCK=_BLOCK)
    expected = -np.log(-np.log1p((hashes + 0.5) * -(2.0**-32)))
    np.testing.assert_allclose(exact.cpu().numpy(), expected, rtol=0, atol=1e-12)
    wrong = np.abs(rough.cpu().numpy() - _OFFSET - expected / np.log(2.0))
    assert wrong[expected > -2.0].max() < 4e-4
    assert wrong.max() < 0.5


@pytest.mark.parametrize("key", [0, 2**63 + 12345, 2**64 - 1, 0x9E3779B97F4A7C15])
def test_hashes_are_those_of_the_definition_and_noise_stays_below_its_bound(device: torch.device, key: int) -> None:
    keys, tokens = np.array([key], dtype=np.uint64), np.arange(_BLOCK)
    hashes = torch.empty(_BLOCK, dtype=torch.int64, device=device)
    most = torch.empty(_BLOCK, device=device)
    _hashes[(1,)](torch.from_numpy(keys.view(np.int64)).to(device), hashes, most, BLOCK=_BLOCK)
    np.testing.assert_array_equal(hashes.cpu().numpy(), token_hash(keys, tokens))
    expected = gumbel(keys, tokens)
    above = most.cpu().numpy() + 32 - expected / np.log(2.0)
    assert above.min() > -ROUNDING.value
    assert np.median(above[expected > 4]) < 0.02, "it is close where tokens win among many"
