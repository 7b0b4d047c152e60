"""Other engines on the same machine, asked through one small interface: the bar that umbel is measured against.

A peer is a server process of its own virtual environment that listens on 127.0.0.1. None of them is a dependency of
umbel: each module's docstring has the command that installs its peer and the repairs that were needed. Where a peer
lies is said by `--peer-python NAME=PATH` and `--peer-model NAME=PATH`, or by the environment
(`UMBEL_PEER_VLLM_CPU_PYTHON`, `UMBEL_PEER_VLLM_CPU_MODEL`). This package and its servers import only the standard
library at import time, because the servers run under the peers' interpreters, where umbel is not installed.

    peer.py           the interface, and the options of one peer
    locate.py         which peers this machine has, and where
    process.py        a server process: started, waited for, weighed, ended
    http_client.py    JSON over HTTP from asyncio
    completion_server.py   the same from the other side, for engines that ship without a server
"""
