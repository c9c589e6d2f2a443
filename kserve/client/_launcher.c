/* The quick road of a launch, compiled: what quick.py writes for one kernel, as a loop over a description of its arguments.
 * And what lets an op find the kernel of a call that is like an earlier one, without looking at its tensors in Python.
 *
 * Torch tensors are read through the table of C functions that torch.Tensor offers to other libraries (DLPack's exchange API),
 * so no attribute is looked up between the call and the driver. Whatever is not an exact torch tensor or plain number, or
 * fails a guard, goes to the slow road with the same arguments. The driver's functions come as addresses from the libcuda
 * that loader.py has opened: this file needs Python's headers and no others.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "arguments are packed by copying their low bytes"
#endif

enum { MOST_PARAMS = 64, MOST_BYTES = 4096, MOST_DEPTH = 32, MOST_DEVICES = 64, N_SIZES = 7, NO_CONTEXT = 201 };
enum { MOST_TENSORS = 8, MOST_DIMS = 8, MOST_LETTERS = 8 };

/* What others have fixed: DLPack 1.x and two functions of the driver. */

typedef struct {
  int32_t type, index;
} Device;

typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
} Dtype;

typedef struct {
  void* data;
  Device device;
  int32_t n_dims;
  Dtype dtype;
  const int64_t *shape, *strides;
  uint64_t byte_offset;
} View;

typedef struct Exchange {
  uint32_t major, minor;
  struct Exchange* older;
  void (*unused[3])(void);
  int (*view_of)(void* object, View* view);
  int (*current_stream)(int32_t device_type, int32_t device, void** stream);
} Exchange;

typedef int (*LaunchKernel)(void* function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                            unsigned block_z, unsigned shared_bytes, void* stream, void** params, void** extra);
typedef int (*CurrentDevice)(int* device);

/* The description of a kernel. */

/* kind: p pointer, i signed, u unsigned, f float, b bool, s bytes, 0 scratch. */
typedef struct {
  int kind, offset, size;
  Dtype dtype;
  uint64_t align_mask;
  int64_t divisible_by, least;
  uint64_t most;
  bool contiguous, nullable;
} Param;

/* One step of an expression in postfix order: k pushes the operand, v the value of that parameter, others are operators. */
typedef struct {
  int op;
  int64_t operand;
} Step;

typedef struct {
  Step* steps;
  Py_ssize_t n_steps;
  int64_t least, most;
} Size;

/* A variant's function on each device, and the dictionary that the slow road adds to. */
typedef struct {
  PyObject* functions;
  void* known[MOST_DEVICES];
} Variant;

/* How tensors are read: the two types whose instances are plain ones, their library's functions, where they have to lie. */
typedef struct {
  PyObject *tensor, *parameter;
  const Exchange* exchange;
  int device_type;
} Reader;

typedef struct {
  PyObject_HEAD Param params[MOST_PARAMS];
  int n_params, n_args, n_bytes;
  bool has_pointers;
  Size sizes[N_SIZES];
  Variant declared, generic;
  PyObject *slow, *failed;
  Reader reader;
  LaunchKernel launch_kernel;
  CurrentDevice current_device;
} Launcher;

/* One call under way. It lives on the stack: launches of other threads, and of finalisers, have their own. */
typedef struct {
  int device; /* of the tensors so far; -1 before the first */
  bool facts_hold;
  int64_t values[MOST_PARAMS];
  int64_t sizes[N_SIZES];
  void *function, *stream;
  void* pointers[MOST_PARAMS];
  _Alignas(64) unsigned char block[MOST_BYTES];
} Call;

/* Expressions: Python's integers, as long as they fit in 64 bits. */

static bool floor_divide(int64_t a, int64_t b, int64_t* quotient, int64_t* remainder) {
  if (b == 0 || (a == INT64_MIN && b == -1)) return false;
  *quotient = a / b;
  *remainder = a % b;
  if (*remainder != 0 && (*remainder < 0) != (b < 0)) {
    *quotient -= 1;
    *remainder += b;
  }
  return true;
}

static bool next_power_of_2(int64_t a, int64_t* result) {
  int64_t power = 1;
  while (power < a) {
    if (power > INT64_MAX / 2) return false;
    power *= 2;
  }
  *result = power;
  return true;
}

static bool apply(int op, int64_t a, int64_t b, int64_t* result) {
  int64_t other;
  switch (op) {
    case '+': return !__builtin_add_overflow(a, b, result);
    case '-': return !__builtin_sub_overflow(a, b, result);
    case '*': return !__builtin_mul_overflow(a, b, result);
    case '/': return floor_divide(a, b, result, &other);
    case '%': return floor_divide(a, b, &other, result);
    case '=': *result = a == b; return true;
    case '!': *result = a != b; return true;
    case '<': *result = a < b; return true;
    case 'l': *result = a <= b; return true;
    case '>': *result = a > b; return true;
    case 'g': *result = a >= b; return true;
    case 'm': *result = a < b ? a : b; return true;
    case 'M': *result = a > b ? a : b; return true;
    default: return false;
  }
}

static bool evaluate(const Size* size, const int64_t* values, int64_t* result) {
  int64_t stack[MOST_DEPTH], *top = stack;
  for (const Step *step = size->steps, *end = step + size->n_steps; step < end; step++) {
    if (step->op == 'k') {
      *top++ = step->operand;
    } else if (step->op == 'v') {
      *top++ = values[step->operand];
    } else if (step->op == 'n') {
      if (__builtin_sub_overflow((int64_t)0, top[-1], &top[-1])) return false;
    } else if (step->op == '2') {
      if (!next_power_of_2(top[-1], &top[-1])) return false;
    } else {
      top--;
      if (!apply(step->op, top[-1], top[0], &top[-1])) return false;
    }
  }
  *result = stack[0];
  return *result >= size->least && *result <= size->most;
}

/* Arguments: true where one passes every guard. */

static bool is_contiguous(const View* view) {
  int64_t expected = 1;
  for (int i = view->n_dims - 1; i >= 0; i--) {
    if (view->shape[i] != 1 && view->strides[i] != expected) return false;
    expected *= view->shape[i];
  }
  return true;
}

/* The memory of a plain tensor on that device, or on any while it is -1, which becomes this one's. */
static bool read_view(const Reader* reader, PyObject* tensor, int* device, View* view) {
  PyObject* type = (PyObject*)Py_TYPE(tensor);
  if (type != reader->tensor && type != reader->parameter) return false;
  if (reader->exchange->view_of(tensor, view) != 0) {
    PyErr_Clear(); /* sparse, nested, on no device: the slow road says which */
    return false;
  }
  if (*device < 0) *device = view->device.index;
  /* A null pointer: no elements, or a tensor without memory of its own, such as a functional one. */
  return view->device.type == reader->device_type && view->device.index == *device && view->dtype.lanes == 1 &&
         view->data != NULL;
}

static bool read_pointer(const Launcher* self, const Param* param, PyObject* argument, Call* call) {
  View view;
  if (argument == Py_None && param->nullable) return true; /* the block is zero */
  if (!read_view(&self->reader, argument, &call->device, &view)) return false;
  if (view.dtype.code != param->dtype.code || view.dtype.bits != param->dtype.bits) return false;
  if (param->contiguous && !is_contiguous(&view)) return false;
  const uint64_t address = (uint64_t)(uintptr_t)view.data + view.byte_offset;
  if (address & param->align_mask) call->facts_hold = false;
  memcpy(call->block + param->offset, &address, sizeof address);
  return true;
}

static bool read_integer(const Param* param, PyObject* argument, Call* call, int64_t* value) {
  int overflow;
  if (!PyLong_CheckExact(argument)) return false; /* a bool is no integer */
  *value = PyLong_AsLongLongAndOverflow(argument, &overflow);
  /* An unsigned number of 64 bits takes the slow road: expressions count in signed ones. */
  if (overflow || *value < param->least || (*value > 0 && (uint64_t)*value > param->most)) return false;
  if (param->divisible_by && *value % param->divisible_by) call->facts_hold = false;
  memcpy(call->block + param->offset, value, (size_t)param->size);
  return true;
}

static bool read_float(const Param* param, PyObject* argument, Call* call) {
  if (!PyFloat_CheckExact(argument)) return false;
  const double wide = PyFloat_AsDouble(argument);
  const float narrow = (float)wide;
  if (param->size == sizeof wide) {
    memcpy(call->block + param->offset, &wide, sizeof wide);
    return true;
  }
  if (isinf(narrow) && !isinf(wide)) return false;
  memcpy(call->block + param->offset, &narrow, sizeof narrow);
  return true;
}

static bool read_bytes(const Param* param, PyObject* argument, Call* call) {
  if (!PyBytes_CheckExact(argument) || PyBytes_Size(argument) != param->size) return false;
  memcpy(call->block + param->offset, PyBytes_AsString(argument), (size_t)param->size);
  return true;
}

static bool read_argument(const Launcher* self, const Param* param, PyObject* argument, Call* call, int64_t* value) {
  switch (param->kind) {
    case 'p': return read_pointer(self, param, argument, call);
    case 'i':
    case 'u': return read_integer(param, argument, call, value);
    case 'f': return read_float(param, argument, call);
    case 's': return read_bytes(param, argument, call);
    default: /* a bool */
      if (argument != Py_True && argument != Py_False) return false;
      *value = argument == Py_True;
      call->block[param->offset] = (unsigned char)*value;
      return true;
  }
}

static bool read_arguments(const Launcher* self, PyObject* const* args, Call* call) {
  call->device = -1;
  call->facts_hold = true;
  memset(call->block, 0, (size_t)self->n_bytes); /* scratch pointers stay null */
  for (int i = 0, next = 0; i < self->n_params; i++) {
    const Param* param = &self->params[i];
    call->pointers[i] = call->block + param->offset;
    if (param->kind != '0' && !read_argument(self, param, args[next++], call, &call->values[i])) return false;
  }
  return call->device >= 0 || !self->has_pointers;
}

/* The rest of a launch: device, sizes, function, stream. */

/* The function's handle; NULL where the slow road has not loaded it on that device yet. */
static void* function_on(Variant* variant, int device) {
  if (device < 0 || device >= MOST_DEVICES) return NULL;
  if (variant->known[device] != NULL) return variant->known[device];
  PyObject* key = PyLong_FromLong(device);
  PyObject* found = key != NULL ? PyDict_GetItemWithError(variant->functions, key) : NULL;
  PyObject* value = found != NULL ? PyObject_GetAttrString(found, "value") : NULL; /* a ctypes.c_void_p */
  if (value != NULL) variant->known[device] = PyLong_AsVoidPtr(value);
  Py_XDECREF(value);
  Py_XDECREF(key);
  PyErr_Clear();
  return variant->known[device];
}

static bool prepare(Launcher* self, PyObject* const* args, Call* call) {
  int device = -1;
  if (!read_arguments(self, args, call)) return false;
  if (self->current_device(&device) != 0 || (call->device >= 0 && call->device != device)) return false;
  for (int i = 0; i < N_SIZES; i++) {
    if (!evaluate(&self->sizes[i], call->values, &call->sizes[i])) return false;
  }
  call->function = function_on(call->facts_hold ? &self->declared : &self->generic, device);
  if (call->function == NULL) return false;
  call->stream = NULL; /* without a tensor there is no library whose stream it could be */
  const Reader* reader = &self->reader;
  if (self->has_pointers && reader->exchange->current_stream(reader->device_type, device, &call->stream) != 0) {
    PyErr_Clear();
    return false;
  }
  return true;
}

static PyObject* take_slow_road(Launcher* self, PyObject* const* args, Py_ssize_t n_args, PyObject* stream, PyObject* grid) {
  PyObject* tuple = PyTuple_New(n_args);
  if (tuple == NULL) return NULL;
  for (Py_ssize_t i = 0; i < n_args; i++) PyTuple_SetItem(tuple, i, Py_NewRef(args[i]));
  PyObject* result = PyObject_CallFunctionObjArgs(self->slow, tuple, stream, grid, NULL);
  Py_DECREF(tuple);
  return result;
}

static bool read_keywords(PyObject* names, PyObject* const* values, PyObject** stream, PyObject** grid) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(names); i++) {
    PyObject* name = PyTuple_GetItem(names, i);
    if (PyUnicode_CompareWithASCIIString(name, "stream") == 0) {
      *stream = values[i];
    } else if (PyUnicode_CompareWithASCIIString(name, "grid") == 0) {
      *grid = values[i];
    } else {
      PyErr_Format(PyExc_TypeError, "launch() got an unexpected keyword argument '%U'", name);
      return false;
    }
  }
  return true;
}

static PyObject* launch(PyObject* object, PyObject* const* args, Py_ssize_t n_args, PyObject* names) {
  Launcher* self = (Launcher*)object;
  PyObject *stream = Py_None, *grid = Py_None;
  Call call;
  if (names != NULL && !read_keywords(names, args + n_args, &stream, &grid)) return NULL;
  if (stream != Py_None || grid != Py_None || n_args != self->n_args || !prepare(self, args, &call))
    return take_slow_road(self, args, n_args, stream, grid);
  const int64_t* size = call.sizes;
  int status;
  /* A launch waits while the device's queue is full, which may take as long as the kernels in it: other threads go on. */
  Py_BEGIN_ALLOW_THREADS;
  status = self->launch_kernel(call.function, (unsigned)size[0], (unsigned)size[1], (unsigned)size[2], (unsigned)size[3],
                               (unsigned)size[4], (unsigned)size[5], (unsigned)size[6], call.stream, call.pointers, NULL);
  Py_END_ALLOW_THREADS;
  if (status == 0) return Py_NewRef(Py_None);
  if (status == NO_CONTEXT) return take_slow_road(self, args, n_args, stream, grid);
  return PyObject_CallFunction(self->failed, "i(LLLLLLL)", status, (long long)size[0], (long long)size[1], (long long)size[2],
                               (long long)size[3], (long long)size[4], (long long)size[5], (long long)size[6]);
}

/* Making one: every number is checked here, so that a launch need not. */

static bool refuse(const char* what) {
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, what);
  return false;
}

static bool is_one_of(int kind, const char* kinds) {
  while (*kinds != kind && *kinds != '\0') kinds++;
  return *kinds != '\0';
}

static bool read_param(Launcher* self, PyObject* item, Param* param) {
  int code, bits, contiguous, nullable;
  long long align, divisible_by;
  if (!PyArg_ParseTuple(item, "CiiiiLLpp", &param->kind, &code, &bits, &param->offset, &param->size, &align, &divisible_by,
                        &contiguous, &nullable))
    return false;
  param->dtype = (Dtype){(uint8_t)code, (uint8_t)bits, 1};
  param->contiguous = contiguous;
  param->nullable = nullable;
  param->divisible_by = divisible_by;
  param->align_mask = align > 0 ? (uint64_t)align - 1 : 0;
  if (param->offset < 0 || param->size < 1 || param->size > MOST_BYTES || param->offset > MOST_BYTES - param->size)
    return refuse("a parameter outside the block");
  if (align < 0 || (align & (align - 1)) || divisible_by < 0) return refuse("no such fact about an argument");
  const bool is_word = is_one_of(param->kind, "p0"), is_number = is_one_of(param->kind, "iufb");
  if (!is_word && !is_number && param->kind != 's') return refuse("a parameter of another kind");
  if ((is_word && param->size != 8) || (is_number && (param->size > 8 || param->size & (param->size - 1))) ||
      (param->kind == 'f' && param->size < 4) || (param->kind == 'b' && param->size != 1))
    return refuse("a parameter of another size");
  const int n_bits = param->size * 8;
  if (param->kind == 'i') {
    param->least = n_bits == 64 ? INT64_MIN : -((int64_t)1 << (n_bits - 1));
    param->most = (uint64_t)INT64_MAX >> (64 - n_bits);
  } else if (param->kind == 'u') {
    param->most = UINT64_MAX >> (64 - n_bits);
  }
  self->has_pointers |= param->kind == 'p';
  self->n_args += param->kind != '0';
  if (self->n_bytes < param->offset + param->size) self->n_bytes = param->offset + param->size;
  return true;
}

static bool read_params(Launcher* self, PyObject* params) {
  const Py_ssize_t n = PyTuple_Size(params);
  if (n < 0 || n > MOST_PARAMS) return refuse("too many parameters");
  for (self->n_params = 0; self->n_params < n; self->n_params++) {
    if (!read_param(self, PyTuple_GetItem(params, self->n_params), &self->params[self->n_params])) return false;
  }
  return true;
}

/* Refuses a step that reads below the stack or grows it beyond its end; depth is what lies on it before, then after. */
static bool check_step(const Launcher* self, const Step* step, int* depth) {
  if (step->op == 'k') {
    *depth += 1;
  } else if (step->op == 'v') {
    *depth += 1;
    if (step->operand < 0 || step->operand >= self->n_params || !is_one_of(self->params[step->operand].kind, "iub"))
      return refuse("an expression reads what is no integer");
  } else if (step->op == 'n' || step->op == '2') {
    if (*depth < 1) return refuse("an expression without operand");
  } else {
    int64_t ignored;
    if (*depth < 2 || !apply(step->op, 1, 1, &ignored)) return refuse("an expression without operand, or of another kind");
    *depth -= 1;
  }
  return *depth <= MOST_DEPTH || refuse("an expression that is too deep");
}

static bool read_size(Launcher* self, PyObject* item, Size* size) {
  PyObject* steps;
  long long least, most;
  int depth = 0;
  if (!PyArg_ParseTuple(item, "O!LL", &PyTuple_Type, &steps, &least, &most)) return false;
  if (least < 0 || most > INT32_MAX) return refuse("a size beyond 31 bits");
  size->least = least;
  size->most = most;
  size->n_steps = PyTuple_Size(steps);
  size->steps = PyMem_Malloc((size_t)(size->n_steps + 1) * sizeof(Step));
  if (size->steps == NULL) return PyErr_NoMemory() != NULL;
  for (Py_ssize_t i = 0; i < size->n_steps; i++) {
    long long operand;
    Step* step = &size->steps[i];
    if (!PyArg_ParseTuple(PyTuple_GetItem(steps, i), "CL", &step->op, &operand)) return false;
    step->operand = operand;
    if (!check_step(self, step, &depth)) return false;
  }
  return depth == 1 || refuse("an expression with no one value");
}

static bool read_sizes(Launcher* self, PyObject* sizes) {
  if (PyTuple_Size(sizes) != N_SIZES) return refuse("a launch has seven sizes");
  for (int i = 0; i < N_SIZES; i++) {
    if (!read_size(self, PyTuple_GetItem(sizes, i), &self->sizes[i])) return false;
  }
  return true;
}

static bool make_reader(Reader* reader, PyObject* tensor, PyObject* parameter, PyObject* capsule) {
  const Exchange* found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  while (found != NULL && found->major != 1) found = found->older;
  if (found == NULL || found->view_of == NULL || found->current_stream == NULL) return refuse("another version of DLPack");
  reader->tensor = Py_NewRef(tensor);
  reader->parameter = Py_NewRef(parameter);
  reader->exchange = found;
  return true;
}

static bool fill(Launcher* self, PyObject* args, PyObject* named) {
  static char* names[] = {"params",  "sizes", "tensor", "parameter",     "exchange",       "device_type", "declared",
                          "generic", "slow",  "failed", "launch_kernel", "current_device", NULL};
  PyObject *params, *sizes, *tensor, *parameter, *exchange, *declared, *generic, *slow, *failed, *launch_kernel,
      *current_device;
  if (!PyArg_ParseTupleAndKeywords(args, named, "$O!O!OOOiO!O!OOO!O!", names, &PyTuple_Type, &params, &PyTuple_Type, &sizes,
                                   &tensor, &parameter, &exchange, &self->reader.device_type, &PyDict_Type, &declared,
                                   &PyDict_Type, &generic, &slow, &failed, &PyLong_Type, &launch_kernel, &PyLong_Type,
                                   &current_device))
    return false;
  self->declared.functions = Py_NewRef(declared);
  self->generic.functions = Py_NewRef(generic);
  self->slow = Py_NewRef(slow);
  self->failed = Py_NewRef(failed);
  self->launch_kernel = (LaunchKernel)PyLong_AsVoidPtr(launch_kernel);
  self->current_device = (CurrentDevice)PyLong_AsVoidPtr(current_device);
  if (self->launch_kernel == NULL || self->current_device == NULL) return refuse("a function at no address");
  return read_params(self, params) && read_sizes(self, sizes) && make_reader(&self->reader, tensor, parameter, exchange);
}

static PyObject* launcher_new(PyTypeObject* type, PyObject* args, PyObject* named) {
  const allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  Launcher* self = (Launcher*)allocate(type, 0); /* zeroed */
  if (self != NULL && !fill(self, args, named)) Py_CLEAR(self);
  return (PyObject*)self;
}

static int launcher_traverse(PyObject* object, visitproc visit, void* arg) {
  Launcher* self = (Launcher*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->reader.tensor);
  Py_VISIT(self->reader.parameter);
  Py_VISIT(self->declared.functions);
  Py_VISIT(self->generic.functions);
  Py_VISIT(self->slow);
  Py_VISIT(self->failed);
  return 0;
}

static int launcher_clear(PyObject* object) {
  Launcher* self = (Launcher*)object;
  Py_CLEAR(self->reader.tensor);
  Py_CLEAR(self->reader.parameter);
  Py_CLEAR(self->declared.functions);
  Py_CLEAR(self->generic.functions);
  Py_CLEAR(self->slow);
  Py_CLEAR(self->failed);
  return 0;
}

static void launcher_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  const freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  PyObject_GC_UnTrack(object);
  launcher_clear(object);
  for (int i = 0; i < N_SIZES; i++) PyMem_Free(((Launcher*)object)->sizes[i].steps);
  release(object);
  Py_DECREF(type);
}

static PyMethodDef launcher_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL | METH_KEYWORDS,
     "launch(*args, stream=None, grid=None)\n\nGuards the arguments, then launches; else takes the slow road."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot launcher_slots[] = {
    {Py_tp_doc, "The quick road of one kernel; see _launcher.pyi."},
    {Py_tp_new, launcher_new},
    {Py_tp_traverse, launcher_traverse},
    {Py_tp_clear, launcher_clear},
    {Py_tp_dealloc, launcher_dealloc},
    {Py_tp_methods, launcher_methods},
    {0, NULL},
};

static PyType_Spec launcher_spec = {
    .name = "kserve.client._launcher.Launcher",
    .basicsize = sizeof(Launcher),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = launcher_slots,
};

/* What calls of an op have in common. */

typedef struct {
  PyObject_HEAD Reader reader;
  int n_tensors, n_letters, n_dims[MOST_TENSORS];
  int8_t dims[MOST_TENSORS][MOST_DIMS]; /* a letter's place in order of appearance, or minus the size that is asked for */
  bool in_key[MOST_LETTERS];
} Signature;

/* "n H, n H, H": tensors, and in each a letter or a digit for every dimension. */
static bool read_pattern(Signature* self, const char* pattern) {
  char letters[MOST_LETTERS];
  self->n_tensors = 1;
  for (; *pattern != '\0'; pattern++) {
    const int tensor = self->n_tensors - 1, dim = self->n_dims[tensor];
    const bool is_upper = *pattern >= 'A' && *pattern <= 'Z';
    if (*pattern == ' ') continue;
    if (*pattern == ',') {
      if (self->n_tensors++ == MOST_TENSORS) return refuse("too many tensors in a pattern");
      continue;
    }
    if (dim == MOST_DIMS) return refuse("too many dimensions in a pattern");
    self->n_dims[tensor]++;
    if (*pattern >= '1' && *pattern <= '9') {
      self->dims[tensor][dim] = (int8_t)('0' - *pattern);
      continue;
    }
    if (!is_upper && (*pattern < 'a' || *pattern > 'z')) return refuse("a pattern has letters, digits, spaces and commas");
    int place = 0;
    while (place < self->n_letters && letters[place] != *pattern) place++;
    if (place == MOST_LETTERS) return refuse("too many letters in a pattern");
    if (place == self->n_letters) letters[self->n_letters++] = *pattern;
    self->in_key[place] = is_upper;
    self->dims[tensor][dim] = (int8_t)place;
  }
  return true;
}

static bool fits(const Signature* self, int tensor, const View* view, int64_t* sizes) {
  if (view->n_dims != self->n_dims[tensor] || !is_contiguous(view)) return false;
  for (int dim = 0; dim < view->n_dims; dim++) {
    const int place = self->dims[tensor][dim];
    const int64_t size = view->shape[dim];
    if (place < 0 ? size != -place : sizes[place] >= 0 && sizes[place] != size) return false;
    if (place >= 0) sizes[place] = size;
  }
  return true;
}

/* (key, size of each letter), or None where the tensors do not fit. The key: dtypes, device, sizes of upper-case letters. */
static PyObject* match(PyObject* object, PyObject* const* args, Py_ssize_t n_args) {
  const Signature* self = (Signature*)object;
  int64_t sizes[MOST_LETTERS], key[1 + MOST_TENSORS + MOST_LETTERS];
  int device = -1, n_words = 1;
  if (n_args != self->n_tensors) return Py_NewRef(Py_None);
  for (int i = 0; i < self->n_letters; i++) sizes[i] = -1;
  for (int i = 0; i < self->n_tensors; i++) {
    View view;
    if (!read_view(&self->reader, args[i], &device, &view) || !fits(self, i, &view, sizes)) return Py_NewRef(Py_None);
    key[n_words++] = view.dtype.code << 8 | view.dtype.bits;
  }
  key[0] = device;
  for (int i = 0; i < self->n_letters; i++) {
    if (self->in_key[i]) key[n_words++] = sizes[i];
  }
  PyObject* found = PyTuple_New(1 + self->n_letters);
  for (int i = -1; found != NULL && i < self->n_letters; i++) {
    PyObject* item =
        i < 0 ? PyBytes_FromStringAndSize((const char*)key, n_words * (Py_ssize_t)sizeof *key) : PyLong_FromLongLong(sizes[i]);
    if (item == NULL || PyTuple_SetItem(found, i + 1, item) != 0) Py_CLEAR(found);
  }
  return found;
}

static PyObject* signature_new(PyTypeObject* type, PyObject* args, PyObject* named) {
  static char* names[] = {"pattern", "tensor", "parameter", "exchange", "device_type", NULL};
  const allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  const char* pattern;
  PyObject *tensor, *parameter, *exchange;
  Signature* self = (Signature*)allocate(type, 0); /* zeroed */
  if (self != NULL && !(PyArg_ParseTupleAndKeywords(args, named, "s$OOOi", names, &pattern, &tensor, &parameter, &exchange,
                                                    &self->reader.device_type) &&
                        read_pattern(self, pattern) && make_reader(&self->reader, tensor, parameter, exchange)))
    Py_CLEAR(self);
  return (PyObject*)self;
}

static int signature_traverse(PyObject* object, visitproc visit, void* arg) {
  Signature* self = (Signature*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->reader.tensor);
  Py_VISIT(self->reader.parameter);
  return 0;
}

static int signature_clear(PyObject* object) {
  Signature* self = (Signature*)object;
  Py_CLEAR(self->reader.tensor);
  Py_CLEAR(self->reader.parameter);
  return 0;
}

static void signature_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  const freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  PyObject_GC_UnTrack(object);
  signature_clear(object);
  release(object);
  Py_DECREF(type);
}

static PyMethodDef signature_methods[] = {
    {"match", (PyCFunction)(void (*)(void))match, METH_FASTCALL, "match(*tensors) -> (key, *sizes) or None"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot signature_slots[] = {
    {Py_tp_doc, "What calls of an op have in common; see _launcher.pyi."},
    {Py_tp_new, signature_new},
    {Py_tp_traverse, signature_traverse},
    {Py_tp_clear, signature_clear},
    {Py_tp_dealloc, signature_dealloc},
    {Py_tp_methods, signature_methods},
    {0, NULL},
};

static PyType_Spec signature_spec = {
    .name = "kserve.client._launcher.Signature",
    .basicsize = sizeof(Signature),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = signature_slots,
};

static int add_type(PyObject* module, const char* name, PyType_Spec* spec) {
  PyObject* type = PyType_FromModuleAndSpec(module, spec, NULL);
  const int failed = type == NULL ? -1 : PyModule_AddObjectRef(module, name, type);
  Py_XDECREF(type);
  return failed;
}

static int fill_module(PyObject* module) {
  const int failed = add_type(module, "Launcher", &launcher_spec);
  return failed ? failed : add_type(module, "Signature", &signature_spec);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kserve.client._launcher",
    .m_doc = "The quick road of a launch, compiled.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__launcher(void) { return PyModuleDef_Init(&module); }
