"""Export models of tables: ONNX files, programs of torch.export, model cards."""

from kapsi.export.card import *
from kapsi.export.interface import *
from kapsi.export.numeric import *
from kapsi.export.onnx_file import *
from kapsi.export.texts_and_images import *
from kapsi.export.torch_file import *
