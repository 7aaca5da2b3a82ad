"""Every limit of the edge: what one client, or all of them together, may send, leave open, or leave unread.

Each limit is a constant here, declared with what it bounds and what is answered beyond it. ``scripts/docs tables``
writes the table of ``docs/security.md`` from these declarations, and a test sends each limit and one more. Code reads a
limit where it applies (``edge_limits.HEAD_BYTES``), so that a test can set a smaller one.
"""

from dataclasses import dataclass
from typing import TypeVar

from diptych.control.admission.admission_config import AdmissionConfig
from diptych.control.config import SchedulerConfig
from diptych.web.panel_wire import ANSWER_S, MOST_CALLS, MOST_QUERY_BYTES, MOST_STREAMS

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class EdgeLimit:
    """One limit. value: in units of unit; subject: what is bounded; beyond: what happens to what exceeds it (a status
    and its code, or the fate of a connection); option: the option that sets it, if any, and value is its default."""

    value: int | float
    unit: str
    subject: str
    beyond: str
    option: str = ""


LIMITS: dict[str, EdgeLimit] = {}  # by the name of the constant


def _limit(name: str, value: Number, unit: str, subject: str, *, beyond: str, option: str = "") -> Number:
    assert name not in LIMITS
    LIMITS[name] = EdgeLimit(value, unit, subject, beyond, option)
    return value


# Connections and heads of requests.

HEAD_BYTES = _limit(
    "HEAD_BYTES", 65_536, "bytes", "request line and headers of a request", beyond="431 `head_too_long`"
)
REQUEST_SILENCE_S = _limit(
    "REQUEST_SILENCE_S",
    60.0,
    "s",
    "silence of a client whose request is awaited or half read",
    beyond="408 `timeout`; without a begun request the connection ends",
)
HEAD_S = _limit("HEAD_S", 60.0, "s", "time for the head of a request, from its first byte", beyond="408 `timeout`")
BODY_BYTES_PER_S = _limit(
    "BODY_BYTES_PER_S",
    4096,
    "bytes/s",
    "least pace of a body, judged every `REQUEST_SILENCE_S`",
    beyond="408 `timeout`",
)
UNANSWERED_REQUESTS = _limit(
    "UNANSWERED_REQUESTS",
    16,
    "requests",
    "requests of one connection that were read and are not answered",
    beyond="they wait unread until one is",
)
REFUSAL_LINGER_S = _limit(
    "REFUSAL_LINGER_S", 1.0, "s", "time for a client to read a refusal", beyond="the connection ends"
)
LISTEN_BACKLOG = _limit(
    "LISTEN_BACKLOG",
    16_384,
    "connections",
    "connections that wait to be accepted (at most `net.core.somaxconn`)",
    beyond="the kernel lets the client try again",
)
REFUSED_CONNECTIONS = _limit(
    "REFUSED_CONNECTIONS",
    256,
    "connections",
    "connections open only to be refused for want of file descriptors with 503 `too_many_connections`",
    beyond="they wait to be accepted",
)

# Bodies that are being read.

BODY_BYTES = _limit(
    "BODY_BYTES", 16 << 20, "bytes", "body of a request", beyond="413 `body_too_large`", option="--max-body"
)
UNREAD_BODIES_BYTES = _limit(
    "UNREAD_BODIES_BYTES",
    128 << 20,
    "bytes",
    "bodies that are half read, of all connections together (at least one of `--max-body`; files go to disk)",
    beyond="503 `too_many_bodies` for the one that has been read longest",
)
FILE_BYTES = _limit(
    "FILE_BYTES",
    256 << 20,
    "bytes",
    "file that is uploaded",
    beyond="413 `file_too_large`",
    option="--batch-max-file",
)
FORM_BYTES = _limit("FORM_BYTES", 65_536, "bytes", "body of an upload besides its file", beyond="413 `body_too_large`")
FORM_PARTS = _limit("FORM_PARTS", 32, "parts", "parts of an upload", beyond="400 `invalid_multipart`")
FORM_FIELD_BYTES = _limit("FORM_FIELD_BYTES", 4096, "bytes", "field of an upload besides its file", beyond="400")
PART_HEAD_BYTES = _limit(  # less than python-multipart takes of one line (4,224), so that this one is met first
    "PART_HEAD_BYTES", 4096, "bytes", "headers of one part of an upload", beyond="400 `invalid_multipart`"
)
BOUNDARY_BYTES = _limit(
    "BOUNDARY_BYTES", 200, "bytes", "boundary between the parts of an upload", beyond="400 `invalid_multipart`"
)

# What a request may hold: fields, lists, texts, tokens.

BODY_DEPTH = _limit(
    "BODY_DEPTH", 256, "levels", "lists and objects in each other in a body", beyond="400 `body_too_deep`"
)
BODY_VALUES = _limit(
    "BODY_VALUES",
    1 << 19,
    "values",
    "texts (names of members too), lists and objects in a body, at any depth",
    beyond="400 `too_many_values`",
)
BODY_ELEMENTS = _limit(
    "BODY_ELEMENTS",
    5 << 20,
    "elements",
    "elements of all lists, and members of all objects, in a body",
    beyond="400 `too_many_values`",
)
BODY_NAME_BYTES = _limit(
    "BODY_NAME_BYTES",
    1 << 15,
    "bytes",
    "name of a member, with its quotes, in a body of more than 2 MiB or 32,768 values",
    beyond="400 `name_too_long`",
)
BODY_GAP_BYTES = _limit(
    "BODY_GAP_BYTES",
    1 << 17,
    "bytes",
    "number, or spaces in a row, in such a body (inside of lists and objects, 64 KiB more may pass)",
    beyond="400 `invalid_json`",
)
BODY_FIELDS = _limit(
    "BODY_FIELDS", 1024, "fields", "fields of a body, a message or a tool, known or not", beyond="400 `too_many_fields`"
)
LIST_ITEMS = _limit(
    "LIST_ITEMS", 65_536, "items", "list of prompts, parts of a message, or biased tokens", beyond="400"
)
MESSAGES = _limit("MESSAGES", 16_384, "messages", "messages, or items of `/v1/responses`, of a request", beyond="400")
CHAT_PROCESSOR_S = _limit(
    "CHAT_PROCESSOR_S",
    5.0,
    "s",
    "processor time to make a prompt of a conversation with the chat template",
    beyond="400 `conversation_too_long`",
)
BIASES = _limit(
    "BIASES", 65_536, "numbers", "entries of `logit_bias`, times the answers that a request asks for", beyond="400"
)
STOP_TEXTS = _limit("STOP_TEXTS", 16, "texts", "texts that end an answer (`stop`, `stop_sequences`)", beyond="400")
STOP_TOKENS = _limit("STOP_TOKENS", 256, "tokens", "tokens that end an answer (`stop_token_ids`)", beyond="400")
TOKEN_IDS = _limit("TOKEN_IDS", 1 << 21, "tokens", "list of token ids, in a request or in a reply", beyond="400")
CONTEXT_EDITS = _limit("CONTEXT_EDITS", 16, "edits", "edits of `context_management`", beyond="400")
TOOLS = _limit("TOOLS", 1024, "tools", "tools of a request", beyond="400")
LABELS = _limit("LABELS", 16, "labels", "labels in `metadata`", beyond="400")
LABEL_NAME = _limit("LABEL_NAME", 64, "characters", "name of a label", beyond="400")
LABEL_VALUE = _limit("LABEL_VALUE", 512, "characters", "value of a label", beyond="400")
EMBEDDING_NUMBERS = _limit("EMBEDDING_NUMBERS", 1 << 22, "numbers", "numbers in one reply of embeddings", beyond="400")
ERROR_CHARACTERS = _limit(
    "ERROR_CHARACTERS",
    4000,
    "characters",
    "message of an error, in which something of the request may come back",
    beyond="its middle is left out",
)

# Grammars, schemas and choices.

CHOICES = _limit("CHOICES", 4096, "texts", "texts to choose among", beyond="400")
GRAMMAR_BYTES = _limit(  # to write a longer one would hold up the other streams of the front end
    "GRAMMAR_BYTES",
    1 << 17,
    "bytes",
    "grammar that a request makes",
    beyond="400; schemas of tools that are not strict are left out instead",
)
SCHEMA_DEPTH = _limit("SCHEMA_DEPTH", 100, "levels", "nesting of a schema", beyond="400")
SCHEMA_PARTS = _limit("SCHEMA_PARTS", 10_000, "values", "values in a schema, at any depth", beyond="400")
GRAMMAR_PROCESSOR_S = _limit(
    "GRAMMAR_PROCESSOR_S", 0.5, "s", "processor time to compile a grammar", beyond="400 `invalid_grammar`"
)
GRAMMAR_CLOCK_S = _limit(
    "GRAMMAR_CLOCK_S",
    6.0,
    "s",
    "time by the clock to compile a grammar on a busy machine",
    beyond="503 `grammar_timeout`",
)
GRAMMAR_MEMORY_BYTES = _limit(
    "GRAMMAR_MEMORY_BYTES", 2 << 30, "bytes", "memory to compile a grammar", beyond="400 `invalid_grammar`"
)
WAITING_GRAMMARS = _limit(
    "WAITING_GRAMMARS", 64, "grammars", "grammars that wait to be compiled", beyond="503 `grammar_queue_full`"
)

# Requests in the queue, streams that are open, replies that nobody reads.

LONG_WORK_WAITING = _limit(
    "LONG_WORK_WAITING",
    256,
    "inputs",
    "long bodies and texts that wait to be decoded, encoded or rendered",
    beyond="429 `too_much_to_read`",
)
LONG_WORK_BYTES = _limit(
    "LONG_WORK_BYTES", 256 << 20, "bytes", "long bodies and texts that wait, together", beyond="429 `too_much_to_read`"
)
QUEUED_REQUESTS = _limit(
    "QUEUED_REQUESTS",
    AdmissionConfig().max_queued,
    "requests",
    "requests that wait for a worker (of these, at most the share of its class where `standard` or `batch` asks)",
    beyond="429 `queue_full`",
    option="--max-queued",
)
WAITING_ON_WORKER = _limit(
    "WAITING_ON_WORKER",
    SchedulerConfig().max_waiting,
    "requests",
    "requests that wait on one worker",
    beyond="429 `queue_full`",
    option="--max-waiting",
)
OPEN_AT_FRONT = _limit(
    "OPEN_AT_FRONT", 65_536, "requests", "requests that `diptych front` has open", beyond="429 `queue_full`"
)
UNREAD_BYTES_AT_FRONT = _limit(
    "UNREAD_BYTES_AT_FRONT",
    1 << 20,
    "bytes",
    "answer at `diptych front` that its client has not read",
    beyond="the engine is read no further until the client reads",
)

# What is stored: responses, files, batches, recorded streams.

_FORGOTTEN = "the oldest of the tenant that has the most are forgotten: 404 `response_not_found`"
RESPONSES_MEMORY_BYTES = _limit(
    "RESPONSES_MEMORY_BYTES",
    256 * 2**20,
    "bytes",
    "responses of `/v1/responses` in memory",
    beyond=_FORGOTTEN,
    option="--max-responses",
)
RESPONSES_FILE_BYTES = _limit(
    "RESPONSES_FILE_BYTES",
    4 * 2**30,
    "bytes",
    "responses in the file of `--responses`",
    beyond=_FORGOTTEN,
    option="--max-responses",
)
RESPONSES = _limit("RESPONSES", 100_000, "responses", "that are stored", beyond=_FORGOTTEN)
RESPONSE_LIFE_S = _limit(
    "RESPONSE_LIFE_S", 30 * 24 * 3600.0, "s", "the life of a stored response", beyond="404 `response_not_found`"
)
RESPONSES_UNWRITTEN_BYTES = _limit(
    "RESPONSES_UNWRITTEN_BYTES",
    64 * 2**20,
    "bytes",
    "responses that wait to be written",
    beyond='the reply says `"store": false`',
)
RESPONSE_WRITE_S = _limit(
    "RESPONSE_WRITE_S",
    10.0,
    "s",
    "the end of a reply waits until its response is stored",
    beyond='the reply says `"store": false`',
)
CONVERSATION_BYTES = _limit(
    "CONVERSATION_BYTES",
    16 * 2**20,
    "bytes",
    "stored items that `previous_response_id`, or references to items, stand for",
    beyond="400 `conversation_too_long`",
)
RECORDED_STREAMS = _limit(
    "RECORDED_STREAMS", 4096, "streams", "streams that are recorded", beyond="more are served without a record"
)
RECORDED_STREAM_S = _limit(
    "RECORDED_STREAM_S", 600.0, "s", "age of the record of a stream that has ended", beyond="it is forgotten"
)
RECORDER_ROWS = _limit(
    "RECORDER_ROWS",
    65_536,
    "rows",
    "rows of a recording (`--record`) that wait for the disk, of one core",
    beyond="the recording ends, with a line in the log",
)
FILES = _limit("FILES", 10_000, "files", "files of batches that are kept", beyond="413 `files_full`")
ALL_FILES_BYTES = _limit(
    "ALL_FILES_BYTES", 10 * 10**9, "bytes", "files of batches together", beyond="413 `files_full`", option="--batch-gb"
)
FILENAME = _limit("FILENAME", 255, "characters", "name of a file", beyond="its end is kept")
FILE_LEAST_S = _limit("FILE_LEAST_S", 3600, "s", "least time until a file expires", beyond="400")
LISTED_FILES = _limit("LISTED_FILES", 10_000, "files", "files on one page of a list", beyond="400")
BATCHES = _limit("BATCHES", 10_000, "batches", "batches that are remembered", beyond="the oldest are forgotten")
OPEN_BATCHES = _limit("OPEN_BATCHES", 1000, "batches", "batches that have not ended", beyond="409 `conflict`")
LISTED_BATCHES = _limit("LISTED_BATCHES", 100, "batches", "batches on one page of a list", beyond="400")
BATCH_LINES = _limit(
    "BATCH_LINES", 100_000, "lines", "lines of a batch", beyond="the batch fails", option="--batch-max-lines"
)
BATCH_LINE_BYTES = _limit("BATCH_LINE_BYTES", 16 << 20, "bytes", "line of a batch", beyond="the batch fails")
BATCH_WINDOW_S = _limit(
    "BATCH_WINDOW_S", 30 * 24 * 3600, "s", "window of a batch, and time until a file expires", beyond="400"
)
BATCH_FAULTS = _limit("BATCH_FAULTS", 100, "faults", "faults of a batch that are reported", beyond="left out")
CUSTOM_ID = _limit("CUSTOM_ID", 512, "characters", "`custom_id` of a line", beyond="the batch fails")

# Pages and observers.

TIMELINE_READERS = _limit("TIMELINE_READERS", 32, "readers", "readers of `/timeline`", beyond="429 `too_many_readers`")
OBSERVER_SILENCE_S = _limit(
    "OBSERVER_SILENCE_S",
    60.0,
    "s",
    "time for a reader of `/timeline` to take what waits for it",
    beyond="its connection ends",
)
TIMELINE_READERS_OF_TENANT = _limit(
    "TIMELINE_READERS_OF_TENANT",
    16,
    "readers",
    "readers of `/timeline` with one key",
    beyond="429 `too_many_readers`",
)
TIMELINE_EVENT_RECORDS = _limit(
    "TIMELINE_EVENT_RECORDS", 500, "records", "records of one event of `/timeline`", beyond="more follow in the next"
)
TIMELINE_PAGE_RECORDS = _limit(  # about 2 us of the event loop each
    "TIMELINE_PAGE_RECORDS", 2000, "records", "records of one page of `/timeline/records`", beyond="400"
)
TRACE_S = _limit("TRACE_S", 86_400, "s", "span of `/timeline/perfetto` that may be asked for", beyond="400")
SHOWN_MISSES = _limit("SHOWN_MISSES", 256, "misses", "misses that `/cache/misses` shows", beyond="400")

GUIDE_CALLS = _limit(
    "GUIDE_CALLS",
    MOST_CALLS,
    "questions",
    "questions of panels that wait behind the one that is answered",
    beyond="503",
)
GUIDE_STREAMS = _limit(
    "GUIDE_STREAMS", MOST_STREAMS, "streams", "streams of panels that are being read", beyond="the oldest ends"
)
GUIDE_ANSWER_S = _limit(
    "GUIDE_ANSWER_S", ANSWER_S, "s", "time to compute a panel, or an event of its stream", beyond="503"
)
GUIDE_QUERY_BYTES = _limit(
    "GUIDE_QUERY_BYTES", MOST_QUERY_BYTES, "bytes", "query of a panel of the guide", beyond="400"
)

# The port of the workers.

WORKER_BACKLOG = _limit(
    "WORKER_BACKLOG", 128, "connections", "connections that wait to be accepted", beyond="the kernel lets them wait"
)
UNSHAKEN_WORKERS = _limit(
    "UNSHAKEN_WORKERS",
    64,
    "connections",
    "connections that have not proved the key",
    beyond="the oldest makes room",
)
WORKER_HANDSHAKE_S = _limit(
    "WORKER_HANDSHAKE_S", 10.0, "s", "time to prove the key, and then to register", beyond="the connection ends"
)
UNREGISTERED_WORKERS = _limit(
    "UNREGISTERED_WORKERS",
    64,
    "connections",
    "connections that have proved the key and not registered",
    beyond="the oldest makes room",
)
WORKER_FIRST_BYTES = _limit(
    "WORKER_FIRST_BYTES", 1 << 16, "bytes", "frame before a worker has registered", beyond="the connection ends"
)
WORKER_FRAME_BYTES = _limit("WORKER_FRAME_BYTES", 1 << 26, "bytes", "frame", beyond="the connection ends")
WORKER_UNSENT_BYTES = _limit(
    "WORKER_UNSENT_BYTES", 1 << 27, "bytes", "frames that the other end does not take", beyond="the connection ends"
)
WORKER_LABEL = _limit("WORKER_LABEL", 64, "characters", "name of a worker's host or rack", beyond="it is refused")
JOINED_WORKERS = _limit(
    "JOINED_WORKERS",
    64,
    "workers",
    "workers that join besides those that the server starts",
    beyond="refused until there is room",
    option="--max-workers",
)

# Replies of engines behind the front.

ENGINE_HEAD_BYTES = _limit("ENGINE_HEAD_BYTES", 65_536, "bytes", "head of an engine's reply", beyond="the reply fails")
ENGINE_REPLY_BYTES = _limit(
    "ENGINE_REPLY_BYTES", 64 << 20, "bytes", "reply that is no stream", beyond="the reply fails"
)
ENGINE_PAGE_BYTES = _limit(
    "ENGINE_PAGE_BYTES", 4 << 20, "bytes", "page that the front reads of an engine: models, gauges", beyond="not used"
)
ENGINE_TOKENS_BYTES = _limit(
    "ENGINE_TOKENS_BYTES",
    64 << 20,
    "bytes",
    "prompt that an engine has rendered or tokenised for the front",
    beyond="the request is placed by load alone",
)
ENGINE_REFUSAL_BYTES = _limit("ENGINE_REFUSAL_BYTES", 65_536, "bytes", "refusal of an engine", beyond="the reply fails")
ENGINE_EVENT_BYTES = _limit(
    "ENGINE_EVENT_BYTES", 16 << 20, "bytes", "event of an engine's stream", beyond="the reply fails"
)

# Keys.

KEY_CHARACTERS = _limit("KEY_CHARACTERS", 4096, "bytes", "an API key", beyond="401 `invalid_api_key`")
KEY_LEAST = _limit("KEY_LEAST", 16, "characters", "an API key in a file, at least", beyond="the file is not used")
KEY_FILE_BYTES = _limit("KEY_FILE_BYTES", 4 * 2**20, "bytes", "the file of `--api-keys`", beyond="it is not used")
KEY_ENTRIES = _limit("KEY_ENTRIES", 10_000, "entries", "the file of `--api-keys`", beyond="it is not used")
KEYS_OF_NAME = _limit("KEYS_OF_NAME", 8, "keys", "one entry of that file", beyond="it is not used")
MODELS_OF_NAME = _limit("MODELS_OF_NAME", 64, "models", "one entry of that file", beyond="it is not used")
KEY_NAMES = _limit("KEY_NAMES", 1000, "names", "names of keys in `/metrics`", beyond="counted as `other`")
SECRET_BYTES = _limit("SECRET_BYTES", 4096, "bytes", "a file with one key (`--admin-key-file`)", beyond="no start")
HELD_TOKENS = _limit(
    "HELD_TOKENS",
    1024,
    "tokens",
    "expected of an answer that runs, for the limits of a key",
    beyond="counted at its end",
)
