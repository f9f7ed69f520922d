"""Where it is written: the catalogue of topics, the partitioner, provisioning (``loom.topics.provisioning``)."""

from loom.topics.catalogue import TOPICS, Catalogue, Topic
from loom.topics.partitioner import mint, partition_of

__all__ = ["TOPICS", "Catalogue", "Topic", "mint", "partition_of"]
