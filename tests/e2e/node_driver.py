"""The second node of an engine on two nodes: ranks only, no engine core. Started by `test_refused_kinds.py`.

What `vllm serve --headless` does for such a node; the `vllm` command of the CPU build does not start.
"""

import json
import sys


def main() -> None:
    """Run the ranks of this node, as the engine arguments in the first argument describe them, until they end."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = AsyncEngineArgs(**json.loads(sys.argv[1])).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


if __name__ == "__main__":
    main()
