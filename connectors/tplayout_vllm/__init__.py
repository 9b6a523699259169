"""TPLayoutConnector for vLLM: stores KV in tplayout's canonical layout, reloads it at any TP size.

`register` is the `vllm.general_plugins` entry point. vLLM calls it in every process, several times in some, and
an exception in it aborts the start: it is idempotent and imports nothing heavy.
"""

CONNECTOR = "TPLayoutConnector"


def register() -> None:
    """Make the connector known to vLLM by name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "tplayout_vllm.connector", CONNECTOR)
