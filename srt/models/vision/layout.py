"""How the rows of a picture's tiles stand one behind the other: LLaVA-NeXT's anyres.

overview, whole                          P × P rows
the grid's tiles as one large picture    without its padding, line by line of patches, and behind each the newline
"""

import torch

from ...multimodal.format import anyres_tokens, unpadded


def arrange(
    features: torch.Tensor, columns: int, rows: int, width: int, height: int, newline: torch.Tensor
) -> torch.Tensor:
    """[1 + rows · columns, patches of a tile, hidden] → [tokens, hidden], of a picture of width × height pixels.

    newline: [hidden]
    """
    overview, tiles = features[0], features[1:]
    side = round(features.shape[1] ** 0.5)
    grid = (
        tiles.view(rows, columns, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    )  # [lines, patches, hidden]
    top, bottom, left, right = unpadded(rows * side, columns * side, width, height)
    shown = grid[top:bottom, left:right]
    lines = torch.cat([shown, newline.expand(len(shown), 1, -1)], dim=1)
    return torch.cat([overview, lines.flatten(0, 1)])


def arranged_tokens(tile_tokens: int, columns: int, rows: int, width: int, height: int) -> int:
    """How many rows `arrange` gives."""
    side = round(tile_tokens**0.5)
    top, bottom, left, right = unpadded(rows * side, columns * side, width, height)
    return tile_tokens + anyres_tokens(bottom - top, right - left)
