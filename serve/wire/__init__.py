"""Everything that crosses a process: messages, codec, sockets."""
