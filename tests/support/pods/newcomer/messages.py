"""In the place of generated stubs: messages of `newcomer.v1`."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message_factory import GetMessageClass

_Field = descriptor_pb2.FieldDescriptorProto
_TEXT, _NUMBER, _FLAG = _Field.TYPE_STRING, _Field.TYPE_UINT32, _Field.TYPE_BOOL
_MESSAGES: dict[str, dict[str, Any]] = {
    "InfoRequest": {},
    "InfoResponse": {"version": _TEXT, "model_id": _TEXT, "max_input_length": _NUMBER},
    "EncodeRequest": {"inputs": _TEXT, "add_special_tokens": _FLAG},
    "SimpleToken": {
        **{"id": _NUMBER, "text": _TEXT, "special": _FLAG},
        **{"start": _NUMBER, "stop": _NUMBER},
    },
    "EncodeResponse": {"tokens": ".newcomer.v1.SimpleToken"},
}
_SERVICES = {
    "Info": {"Info": ("InfoRequest", "InfoResponse")},
    "Tokenize": {"Tokenize": ("EncodeRequest", "EncodeResponse")},
}


def _file() -> FileDescriptor:
    file = descriptor_pb2.FileDescriptorProto(
        name="newcomer_skeleton.proto", package="newcomer.v1", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields.items(), start=1):
            added = message.field.add(name=field, number=number, json_name=field)
            added.label = _Field.LABEL_OPTIONAL
            if isinstance(kind, str):
                added.label, added.type, added.type_name = (
                    *(_Field.LABEL_REPEATED, _Field.TYPE_MESSAGE),
                    kind,
                )
            else:
                added.type = kind
    for name, methods in _SERVICES.items():
        service = file.service.add(name=name)
        for method, (request, response) in methods.items():
            service.method.add(
                name=method,
                input_type=f".newcomer.v1.{request}",
                output_type=f".newcomer.v1.{response}",
            )
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindFileByName(file.name)


DESCRIPTOR = _file()


def message(name: str) -> Any:
    """The class of a message."""
    return GetMessageClass(DESCRIPTOR.message_types_by_name[name])
