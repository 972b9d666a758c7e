"""Bytes of a transcript entry: the codec belongs to the store, so that inspection reads what commit has written."""

from snapshot_store.transcript_codec import decode_entry, encode_entry

__all__ = ["decode_entry", "encode_entry"]
