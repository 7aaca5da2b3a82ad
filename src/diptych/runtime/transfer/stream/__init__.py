"""KV over a byte stream: connections, frames, both ends of a transfer."""
